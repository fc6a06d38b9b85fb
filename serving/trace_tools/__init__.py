"""Editing, generating and summarising traces: functions over streams of requests, behind `python -m serving trace`."""
