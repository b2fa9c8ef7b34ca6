"""The forward for e4m3 inputs."""
