"""One module per kernel category: its key columns, its sweep, and the work of each of its cells.

A category module has `CATEGORY`, `UNITS` (key column -> unit), `DRIVERS` (what its cost follows), `kv_cap_tokens(spec)`
(the most KV tokens that one query reads, None when uncapped), `shots(spec, limits) -> list[Shot]` and
`work(spec, tp, name, key) -> Work`. Modules whose name starts with an underscore are shared helpers.
"""
