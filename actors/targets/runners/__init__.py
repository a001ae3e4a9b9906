"""Runners that execute a rank's steps, driven from the host or on the device."""
