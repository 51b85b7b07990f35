"""Control of a running cluster: requests, their socket, its state folder, its status."""
