"""`manta simulate`: a day of traffic over a fleet of simulated replicas, policy beside policy."""
