"""Many runs and what they show together: their expansion, their processes, their table and their figure."""
