"""The places of state: memory, disks, stores."""
