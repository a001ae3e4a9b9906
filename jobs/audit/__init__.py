"""`manta audit`: compares a dataset's answers with and without speculation and writes a certificate."""
