//! Why a measurement could not be made, and what mends it.

use ashlar_pool::error::PoolError;
use ashlar_raid::error::ChangeError;
use ashlar_reactor::cores::CoreError;
use ashlar_target::export::ExportError;

use crate::verify::Mismatch;

#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// What was asked for cannot be.
    #[error("{error}")]
    Spec { error: String, fix: String },
    #[error(transparent)]
    Core(#[from] CoreError),
    #[error(transparent)]
    Change(#[from] ChangeError),
    #[error(transparent)]
    Pool(#[from] PoolError),
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A request that was answered with an error.
    #[error("a {} at byte {offset} failed: {why}", if *.write { "write" } else { "read" })]
    Request { write: bool, offset: u64, why: String },
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    /// The back end of a socket, or what it said.
    #[error("{error}")]
    BackEnd { error: String, fix: Option<String> },
    #[error("{what}: {error}")]
    System { what: &'static str, error: std::io::Error },
    #[error("the reactor ended in the middle")]
    ReactorEnded,
}

impl BenchError {
    pub(crate) fn spec(error: impl Into<String>, fix: impl Into<String>) -> BenchError {
        BenchError::Spec { error: error.into(), fix: fix.into() }
    }

    pub(crate) fn back_end(error: impl Into<String>, fix: impl Into<String>) -> BenchError {
        BenchError::BackEnd { error: error.into(), fix: Some(fix.into()) }
    }

    pub(crate) fn system(what: &'static str) -> impl Fn(std::io::Error) -> BenchError {
        move |error| BenchError::System { what, error }
    }
}
