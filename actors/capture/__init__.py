"""Captured traffic: prompts and answers of requests, stored to train drafters. Off by default."""
