"""Slots in Nomad, Kubernetes and Modal."""
