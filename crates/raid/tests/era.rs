//! Goal: what the journal has acknowledged is there after a crash, however often the superblock was
//! written before, and whichever build wrote it.
//! Method: superblocks of arrays in files in memory are given later generations, or made ones of
//! version 3; then writes, crashes, and a plain copy of the bytes.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::{ArraySuperblock, ERA_MAX, Level, Policy, SLOTS};
use ashlar_format::record::{open, payload_checksum, seal};
use ashlar_raid::error::AssembleError;
use ashlar_raid::label;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use zerocopy::IntoBytes;

use crate::pair::{DRIVE_BYTES, Pair, run};

/// Generations that are added: an even number, as there are two slots.
const MANY: u64 = (1 << 30) + 4;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Version {
    Three,
    Newest,
}

/// Stops the array, changes its superblocks, and starts it.
async fn age(pair: &mut Pair, more: u64, version: Version) -> Result<(), AssembleError> {
    let members = pair.array.status().members;
    let drives: Vec<_> = members.into_iter().filter_map(|member| member.drive).collect();
    pair.array.stop().await.unwrap();
    for drive in &drives {
        let label = label::read(&pair.reactor, drive).await.unwrap().unwrap();
        for slot in 0..SLOTS {
            let home = label.layout.superblocks.offset + slot * ArraySuperblock::BYTES;
            let buffer = pair.reactor.buffer(4096);
            drive.read(home, buffer.clone().into()).await.unwrap();
            let bytes = buffer.bytes().to_vec();
            let Ok(found) = open::<ArraySuperblock>(&bytes, Some(label.drive_uuid), home) else {
                continue;
            };
            let mut aged = found.clone();
            let generation = found.header.sequence.get() + more;
            if version == Version::Three {
                aged.era = 0.into();
            }
            seal(&mut aged, label.drive_uuid, home, generation);
            if version == Version::Three {
                aged.header.version = 3.into();
                aged.header.checksum = 0.into();
                aged.header.checksum = payload_checksum(aged.as_bytes()).into();
            }
            buffer.copy_from_slice(aged.as_bytes());
            drive.write(home, buffer.into()).await.unwrap();
        }
    }
    let drives = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions::default();
    pair.array = ashlar_raid::array::Array::assemble(&pair.reactor, drives, options).await?;
    Ok(())
}

#[test]
fn nothing_is_lost_after_many_generations() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid1, 2), (Level::Raid5, 3)] {
            let spec = ArraySpec { policy: Some(Policy::Journal), ..Pair::spec(level) };
            let mut pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
            for version in [Version::Newest, Version::Three, Version::Newest] {
                let more = if version == Version::Three { 0 } else { MANY };
                age(&mut pair, more, version).await.unwrap();
                for _ in 0..2 {
                    pair.write_some(10).await;
                    assert!(pair.array.status().journal.pending_bytes > 0);
                    pair.crash_without(&[]).await;
                    pair.check().await;
                }
            }
            assert!(pair.array.status().generation > 2 * MANY);
            pair.array.stop().await.unwrap();
        }
    });
}

/// The journal of version 3 had no more sequences that any build believes.
#[test]
fn too_many_generations_of_version_3_are_refused() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        assert_eq!(age(&mut pair, ERA_MAX, Version::Three).await, Err(AssembleError::NoSuperblock));
    });
}
