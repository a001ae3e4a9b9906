"""Live servers, replicas, proxies and clients for tests."""
