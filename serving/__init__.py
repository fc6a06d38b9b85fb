"""Replay of request traces against measured tables, sizing and capacity planning."""
