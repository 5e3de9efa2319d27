//! A ring of a kind that not every kernel has: built when a device first wants it.

use crate::op::Errno;
use crate::uring::gauges::Why;
use crate::uring::ring::errno;

/// Whether there is such a ring.
pub(super) enum Trial<T> {
    Off,
    /// No device has been there that could use it.
    Untried,
    Failed(Errno),
    On(Box<T>),
}

impl<T> Trial<T> {
    /// The ring, built when it is first asked for.
    pub(super) fn ring(
        &mut self,
        build: impl FnOnce() -> std::io::Result<T>,
    ) -> Result<&mut T, Why> {
        if let Trial::Untried = self {
            *self = match build() {
                Ok(ring) => Trial::On(Box::new(ring)),
                Err(error) => Trial::Failed(errno(&error)),
            };
        }
        match self {
            Trial::On(ring) => Ok(ring),
            Trial::Failed(errno) => Err(Why::Refused(*errno)),
            Trial::Off | Trial::Untried => Err(Why::Off),
        }
    }

    pub(super) fn on(&mut self) -> Option<&mut T> {
        match self {
            Trial::On(ring) => Some(ring),
            Trial::Off | Trial::Untried | Trial::Failed(_) => None,
        }
    }
}
