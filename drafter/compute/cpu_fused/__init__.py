"""A bf16 pass in one call, on CPUs that multiply bf16. Nothing else needs this folder."""
