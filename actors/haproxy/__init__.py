"""HAProxy as Ray Serve runs it, for operators: private, supervised, with probes and one scrape of all."""
