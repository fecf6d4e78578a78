"""What measures this project: hook costs, links, convergence, compatibility, faults under a manager."""
