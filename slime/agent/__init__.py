"""Agents: programs that talk to an endpoint of ours, whose turns become samples: trajectory, adapters, sandbox, harness."""
