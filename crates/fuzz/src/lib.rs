//! Hostile clients: a front end's initiator gone wrong, from a seed. Of vhost-user so far.
//!
//! A client knows its protocol well enough to get far, and errs, lies and stops anywhere. It only
//! speaks; whether the daemon bore it is for the test to find out.

pub mod vhost;
