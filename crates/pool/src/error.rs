//! Why a volume could not be made or changed. Nothing was changed.

use ashlar_raid::error::ArrayError;

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    #[error("there is a volume {0} already")]
    Exists(String),
    #[error("there is no volume {0}")]
    NotFound(String),
    #[error("{wanted} bytes are wanted, {free} are free")]
    Full { wanted: u64, free: u64 },
    #[error("free space is in too many pieces for one volume of {wanted} bytes")]
    Fragmented { wanted: u64 },
    #[error("an array holds at most {0} volumes")]
    TooMany(usize),
    #[error("a volume can only grow: it has {has} bytes")]
    Shrink { has: u64 },
    #[error("another change of this array's volumes is under way; try again")]
    Busy,
    #[error("{0}")]
    Name(String),
    #[error("a size must be a multiple of 512 bytes and above zero")]
    Size,
    #[error("{0}")]
    Array(#[from] ArrayError),
}
