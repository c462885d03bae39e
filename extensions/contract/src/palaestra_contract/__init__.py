"""The Python API of Atropos and Hermes, for which existing scripts were written: their classes of environments, pools
and helpers, `palaestra env port`, and names that have no effect here.

Environments that are written for Palaestra need none of it. No module below this package imports it.
"""
