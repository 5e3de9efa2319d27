//! Gives out volumes: the table of an array's thick volumes, and its free space.

use std::rc::Rc;

use ashlar_raid::array::Array;

use crate::error::PoolError;
use crate::volume::Volume;

pub struct Pool {
    array: Rc<Array>,
}

impl Pool {
    /// Reads the volume table of a started array.
    pub async fn open(array: Rc<Array>) -> Result<Rc<Pool>, PoolError> {
        Ok(Rc::new(Pool { array }))
    }

    pub fn array(&self) -> &Rc<Array> {
        &self.array
    }

    /// All volumes, by name.
    pub fn volumes(&self) -> Vec<Volume> {
        todo!()
    }

    pub fn volume(&self, name: &str) -> Option<Volume> {
        let _ = name;
        todo!()
    }

    /// Bytes not given to any volume.
    pub fn free_bytes(&self) -> u64 {
        todo!()
    }

    /// Makes a volume of `bytes`, all zero. Durable when this returns.
    pub async fn create(
        &self,
        uuid: [u8; 16],
        name: &str,
        bytes: u64,
    ) -> Result<Volume, PoolError> {
        let _ = (uuid, name, bytes);
        todo!()
    }

    /// Grows a volume; the new end reads as zeroes. Durable when this returns.
    pub async fn resize(&self, name: &str, bytes: u64) -> Result<(), PoolError> {
        let _ = (name, bytes);
        todo!()
    }

    /// Deletes a volume; its space can be used again. Durable when this returns. The caller has
    /// made sure that nobody uses it.
    pub async fn delete(&self, name: &str) -> Result<(), PoolError> {
        let _ = name;
        todo!()
    }
}
