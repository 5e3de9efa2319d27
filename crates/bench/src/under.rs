//! What is measured in this process: drives, an array of them, or a volume on it.

use std::fmt::Display;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::layout::{Layout, Shape};
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::buffer::{BUFFER_BYTES_MAX, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;

use crate::error::BenchError;
use crate::verify::stamp;

/// Sector size of drives that are memory, or nothing.
const MEMORY_SECTOR_BYTES: u32 = 512;
/// Worked on where nothing else is asked for: more than caches hold, and soon written once.
pub const SIZE_BYTES_USUAL: u64 = 256 << 20;
const NAME: &str = "bench";

/// What a drive is made of.
pub enum Source {
    Ram {
        bytes: u64,
    },
    /// Nothing: completes at once, keeps no bytes.
    Null {
        bytes: u64,
    },
    /// A file or block device, opened by whoever may overwrite it.
    Opened {
        name: String,
        device: Device,
        limits: Limits,
    },
}

/// How high up requests are made: the difference of two is what a layer costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    Drive,
    Raid,
    Volume,
}

impl Layer {
    pub fn name(self) -> &'static str {
        match self {
            Layer::Drive => "drive",
            Layer::Raid => "raid",
            Layer::Volume => "volume",
        }
    }
}

/// What shall be set up. Drives of it are overwritten.
pub struct UnderSpec {
    pub sources: Vec<Source>,
    pub layer: Layer,
    pub level: Level,
    pub shape: Shape,
    pub chunk_bytes: u32,
    /// `None`: as the level has it.
    pub policy: Option<Policy>,
    pub integrity: bool,
    /// Members that are pulled, from the first on, once everything was written.
    pub pulled: u8,
    /// The range that is worked on; `None`: [`SIZE_BYTES_USUAL`], or less if there is no more.
    pub size_bytes: Option<u64>,
    pub block_bytes: u32,
    /// What was written first is put in place before anything is asked: else the journal's memory
    /// answers reads of it. For writes an empty journal would be the exception.
    pub at_rest: bool,
}

impl UnderSpec {
    /// Refuses what cannot be, before anything is overwritten.
    pub fn check(&self, verified: bool) -> Result<(), BenchError> {
        let has_null = self.sources.iter().any(|source| matches!(source, Source::Null { .. }));
        if has_null && (verified || self.integrity) {
            return Err(BenchError::spec(
                "a null drive keeps no bytes: there is nothing to verify",
                "use ram:SIZE drives, or leave --verify and --integrity out",
            ));
        }
        if self.block_bytes == 0
            || !self.block_bytes.is_multiple_of(MEMORY_SECTOR_BYTES)
            || self.block_bytes as usize > BUFFER_BYTES_MAX
        {
            return Err(BenchError::spec(
                format!("{} bytes are no size for a request", self.block_bytes),
                "use --block 512 to 1M, a multiple of 512",
            ));
        }
        if self.sources.is_empty() {
            return Err(BenchError::spec("there are no drives", "such as --drives ram:512M*5"));
        }
        if self.layer == Layer::Drive {
            return if self.pulled == 0 { Ok(()) } else { Err(no_redundancy(self.pulled)) };
        }
        let layout = Layout::new(self.level, self.sources.len(), self.shape, self.chunk_bytes);
        let layout = layout.map_err(|error| {
            BenchError::spec(error, "see --level, --drives, --members and --chunk")
        })?;
        if self.pulled > layout.tolerated() {
            return Err(BenchError::spec(
                format!("an array like this serves without {} members at most", layout.tolerated()),
                format!("use --degraded {} or less, or another --level", layout.tolerated()),
            ));
        }
        Ok(())
    }
}

fn no_redundancy(pulled: u8) -> BenchError {
    BenchError::spec(
        format!("without {pulled} drives, what they hold is gone: drives alone have no redundancy"),
        "use --what raid or --what volume with --degraded",
    )
}

/// What requests go to.
enum Target {
    Drives {
        drives: Vec<Rc<Drive>>,
        /// Bytes in a row on one drive; then follows the next drive.
        unit_bytes: u64,
    },
    Array(Rc<Array>),
    Volume {
        volume: Volume,
        array: Rc<Array>,
    },
    /// A volume of another reactor, which sets it up and ends it.
    Offered(Volume),
}

pub struct Under {
    target: Target,
    size_bytes: u64,
}

impl Under {
    /// Sets everything up, writes every block of the range once, and pulls members.
    pub async fn new(reactor: &Reactor, spec: UnderSpec, seed: u64) -> Result<Under, BenchError> {
        let (pulled, block_bytes, at_rest) = (spec.pulled, spec.block_bytes, spec.at_rest);
        let under = build(reactor, spec).await?;
        under.lay(reactor, block_bytes, seed).await?;
        if let Some(array) = under.array() {
            if at_rest {
                array.destage_all().await.map_err(|error| BenchError::Change(error.into()))?;
            }
            for member in 0..pulled {
                array.pull_member(MemberIndex(member))?;
            }
        }
        Ok(under)
    }

    /// What another reactor has set up, as it was offered to this one.
    pub fn offered(volume: Volume, size_bytes: u64) -> Under {
        Under { target: Target::Offered(volume), size_bytes }
    }

    /// Of the range that is worked on.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub fn volume(&self) -> Option<&Volume> {
        match &self.target {
            Target::Volume { volume, .. } | Target::Offered(volume) => Some(volume),
            Target::Drives { .. } | Target::Array(_) => None,
        }
    }

    fn array(&self) -> Option<&Rc<Array>> {
        match &self.target {
            Target::Array(array) | Target::Volume { array, .. } => Some(array),
            Target::Drives { .. } | Target::Offered(_) => None,
        }
    }

    pub async fn read(&self, offset: u64, into: Buffers) -> Result<(), BenchError> {
        let read = match &self.target {
            Target::Drives { drives, unit_bytes } => {
                let (drive, at) = place(drives, *unit_bytes, offset);
                drive.read(at, into).await.map_err(text)
            }
            Target::Array(array) => array.read(offset, into).await.map_err(text),
            Target::Volume { volume, .. } | Target::Offered(volume) => {
                volume.read(offset, into).await.map_err(text)
            }
        };
        read.map_err(|why| BenchError::Request { write: false, offset, why })
    }

    pub async fn write(&self, offset: u64, from: Buffers) -> Result<(), BenchError> {
        let written = match &self.target {
            Target::Drives { drives, unit_bytes } => {
                let (drive, at) = place(drives, *unit_bytes, offset);
                drive.write(at, from).await.map_err(text)
            }
            Target::Array(array) => array.write(offset, from).await.map_err(text),
            Target::Volume { volume, .. } | Target::Offered(volume) => {
                volume.write(offset, from).await.map_err(text)
            }
        };
        written.map_err(|why| BenchError::Request { write: true, offset, why })
    }

    /// Writes every block for the first time: an array answers reads of what was never written
    /// without asking its drives, and memory that was never touched is not there yet.
    async fn lay(&self, reactor: &Reactor, block_bytes: u32, seed: u64) -> Result<(), BenchError> {
        let block = block_bytes as usize;
        let step = match &self.target {
            Target::Drives { unit_bytes, .. } => usize::try_from(*unit_bytes).unwrap_or(block),
            Target::Array(_) | Target::Volume { .. } | Target::Offered(_) => {
                BUFFER_BYTES_MAX / block * block
            }
        };
        let mut offset = 0;
        while offset < self.size_bytes {
            let left = usize::try_from(self.size_bytes - offset).unwrap_or(usize::MAX);
            let mut buffer = reactor.buffer(step.min(left));
            for (bytes, place) in buffer.bytes_mut().chunks_exact_mut(block).zip(0..) {
                stamp(bytes, seed, offset + place * u64::from(block_bytes), 1);
            }
            let len = buffer.len() as u64;
            self.write(offset, buffer.into()).await?;
            offset += len;
        }
        Ok(())
    }

    /// Everything is put in place, and the array ends.
    pub async fn stop(&self) -> Result<(), BenchError> {
        let Some(array) = self.array() else { return Ok(()) };
        array.stop().await.map_err(|error| BenchError::Change(error.into()))
    }
}

fn text(error: impl Display) -> String {
    error.to_string()
}

/// 3 drives, units of 64K: byte 260K is in unit 4, the second one of drive 1: its byte 68K.
fn place(drives: &[Rc<Drive>], unit_bytes: u64, offset: u64) -> (&Rc<Drive>, u64) {
    let count = drives.len() as u64;
    let (unit, inside) = (offset / unit_bytes, offset % unit_bytes);
    let drive = usize::try_from(unit % count).expect("below the count");
    (&drives[drive], unit / count * unit_bytes + inside)
}

async fn build(reactor: &Reactor, spec: UnderSpec) -> Result<Under, BenchError> {
    let UnderSpec { layer, chunk_bytes, block_bytes, size_bytes: wanted, .. } = spec;
    let drives: Vec<Rc<Drive>> =
        spec.sources.into_iter().enumerate().map(|(n, its)| drive(reactor, n, its)).collect();
    if layer == Layer::Drive {
        let unit = if chunk_bytes.is_multiple_of(block_bytes) { chunk_bytes } else { block_bytes };
        let unit_bytes = u64::from(unit);
        let least = drives.iter().map(|drive| drive.limits().bytes).min().unwrap_or(0);
        let has = least / unit_bytes * unit_bytes * drives.len() as u64;
        let size_bytes = size(wanted, has, block_bytes)?;
        return Ok(Under { target: Target::Drives { drives, unit_bytes }, size_bytes });
    }
    let array_spec = ArraySpec {
        uuid: [1; 16],
        name: NAME.into(),
        level: spec.level,
        chunk_bytes,
        shape: spec.shape,
        policy: spec.policy,
        integrity: spec.integrity,
        settings: SettingsChange::default(),
        host: None,
    };
    let members = drives.into_iter().zip(1..).map(|(drive, id)| ([id; 16], drive));
    let array = Array::create(reactor, &array_spec, members.collect()).await?;
    let size_bytes = size(wanted, array.capacity(), block_bytes)?;
    if layer == Layer::Raid {
        return Ok(Under { target: Target::Array(array), size_bytes });
    }
    let pool = Pool::open(array.clone()).await?;
    let volume = pool.create([2; 16], NAME, size_bytes).await?;
    Ok(Under { target: Target::Volume { volume, array }, size_bytes })
}

fn drive(reactor: &Reactor, number: usize, source: Source) -> Rc<Drive> {
    let memory = |bytes| Limits { bytes, sector_bytes: MEMORY_SECTOR_BYTES, zeroes_cheaply: true };
    let (name, device, limits) = match source {
        Source::Ram { bytes } => (format!("ram{number}"), Device::Ram { bytes }, memory(bytes)),
        Source::Null { bytes } => (format!("null{number}"), Device::Null { bytes }, memory(bytes)),
        Source::Opened { name, device, limits } => (name, device, limits),
    };
    Drive::new(reactor, device, limits, &name)
}

/// What is worked on, of what there is: whole blocks.
fn size(wanted: Option<u64>, has: u64, block_bytes: u32) -> Result<u64, BenchError> {
    let bytes = wanted.unwrap_or(SIZE_BYTES_USUAL.min(has));
    if bytes > has {
        let error = format!("{bytes} bytes are to be worked on, and there are {has}");
        return Err(BenchError::spec(error, "use a smaller --size, or larger drives"));
    }
    let whole = bytes - bytes % u64::from(block_bytes);
    if whole == 0 {
        let error = format!("{bytes} bytes hold no request of {block_bytes}");
        return Err(BenchError::spec(error, "use a larger --size, or a smaller --block"));
    }
    Ok(whole)
}

#[cfg(test)]
mod tests {
    //! Goal: what cannot be is refused before a drive is touched, with the option that mends it.
    //! Method: each mistake once.

    use super::*;

    fn spec() -> UnderSpec {
        UnderSpec {
            sources: (0..5).map(|_| Source::Ram { bytes: 64 << 20 }).collect(),
            layer: Layer::Volume,
            level: Level::Raid5,
            shape: Shape::default(),
            chunk_bytes: 64 << 10,
            policy: None,
            integrity: false,
            pulled: 0,
            size_bytes: None,
            block_bytes: 4096,
            at_rest: false,
        }
    }

    fn fix_of(spec: &UnderSpec, verified: bool) -> String {
        match spec.check(verified) {
            Err(BenchError::Spec { fix, .. }) => fix,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn mistakes_are_named() {
        assert!(spec().check(true).is_ok());
        let degraded = |layer, pulled| UnderSpec { layer, pulled, ..spec() };
        assert!(degraded(Layer::Raid, 1).check(false).is_ok());
        assert!(fix_of(&degraded(Layer::Raid, 2), false).contains("--degraded 1"));
        assert!(fix_of(&degraded(Layer::Drive, 1), false).contains("--what raid"));
        for block_bytes in [0, 100, 2 << 20] {
            let fix = fix_of(&UnderSpec { block_bytes, ..spec() }, false);
            assert!(fix.contains("--block"), "{block_bytes}");
        }
        let null = || UnderSpec { sources: vec![Source::Null { bytes: 64 << 20 }], ..spec() };
        assert!(fix_of(&null(), true).contains("ram:SIZE"));
        assert!(fix_of(&null(), false).contains("--drives"), "one drive is no RAID 5");
        assert!(fix_of(&UnderSpec { sources: Vec::new(), ..spec() }, false).contains("--drives"));
    }

    #[test]
    fn sizes_are_whole_blocks_of_what_there_is() {
        assert_eq!(size(None, 1 << 40, 4096).unwrap(), SIZE_BYTES_USUAL);
        assert_eq!(size(None, 10_000, 4096).unwrap(), 8192);
        assert_eq!(size(Some(9000), 10_000, 4096).unwrap(), 8192);
        assert!(size(Some(10_001), 10_000, 4096).is_err());
        assert!(size(Some(4095), 10_000, 4096).is_err());
    }
}
