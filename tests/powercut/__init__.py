"""Power cuts on a database that runs on Ashlar: `cargo xtask powercut`."""
