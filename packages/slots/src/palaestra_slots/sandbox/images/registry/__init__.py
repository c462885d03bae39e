"""Pulls images from registries over HTTP, without a container tool."""
