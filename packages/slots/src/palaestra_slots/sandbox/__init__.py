"""Slots, the pool, snapshots and backends."""
