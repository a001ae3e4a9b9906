"""How a rank steps: driven from the host, or on the device."""
