"""What tests, benchmarks and `jflash check` share: workloads, their inputs, and the error rule."""
