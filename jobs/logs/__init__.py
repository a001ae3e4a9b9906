"""`manta logs`: explains the course of a request, from a server's memory or from log files."""
