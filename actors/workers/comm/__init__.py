"""Communication between ranks: process groups and the small all-reduce."""
