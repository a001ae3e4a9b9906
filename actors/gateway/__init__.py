"""Several replicas and models behind one entry: who is there, who gets a request, what outlives a replica."""
