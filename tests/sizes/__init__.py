"""Every hook over gloo processes, on models of ordinary size, against its algorithm in fp64 and simulated ranks."""
