//! What a newer build wrote: a drive that has any of it is refused, before anything is written to
//! it.
//!
//! A record of a version that this build does not know does not open, as a torn one does not; but
//! what it says must not be passed over: blocks that are lost would read as good ones, and volumes
//! would be gone. The superblock is looked at where it is read (`assemble.rs`), batches of the
//! journal before any is replayed (`replay/found.rs`).

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::bad_blocks::BadBlocks;
use ashlar_format::lease::Lease;
use ashlar_format::record::{self, Record, RecordError};
use ashlar_format::region_map::RegionMapPage;
use ashlar_format::scrub_report::ScrubReport;
use ashlar_format::units::Area;
use ashlar_format::volume_table::VolumeTable;
use ashlar_reactor::executor::Reactor;

use crate::error::AssembleError;
use crate::label::{self, Label};

pub(crate) async fn refuse(
    reactor: &Reactor,
    drive: &Rc<Drive>,
    label: &Label,
) -> Result<(), AssembleError> {
    let areas = &label.layout;
    let everywhere: [(_, _, VersionIn); 6] = [
        ("dirty map", areas.dirty_map, version_in::<RegionMapPage>),
        ("written map", areas.written_map, version_in::<RegionMapPage>),
        ("missed map", areas.missed_map, version_in::<RegionMapPage>),
        ("volume table", areas.volume_table, version_in::<VolumeTable>),
        ("bad blocks", areas.bad_blocks, version_in::<BadBlocks>),
        ("lease", areas.lease, version_in::<Lease>),
    ];
    let of_scrub: VersionIn = version_in::<ScrubReport>;
    let scrub_report = ScrubReport::area(areas).map(|area| ("scrub report", area, of_scrub));
    for (what, area, version_in) in everywhere.into_iter().chain(scrub_report) {
        // What cannot be read is seen to where it is needed.
        let read = label::read_bytes(reactor, drive, area.offset, area.len).await;
        let Ok(bytes) = read else { continue };
        if let Some(version) = version_in(&bytes, label.drive_uuid, area) {
            return Err(AssembleError::Newer { drive: drive.name().to_owned(), what, version });
        }
    }
    Ok(())
}

type VersionIn = fn(&[u8], [u8; 16], Area) -> Option<u16>;

/// The version of the first record of an area that is newer than this build's.
fn version_in<T: Record>(bytes: &[u8], drive: [u8; 16], area: Area) -> Option<u16> {
    let homes = (area.offset..).step_by(size_of::<T>());
    let mut records = bytes.chunks_exact(size_of::<T>()).zip(homes);
    records.find_map(|(bytes, home)| match record::open::<T>(bytes, Some(drive), home) {
        Err(RecordError::Version(version)) => (version > T::VERSION).then_some(version),
        Ok(_) | Err(_) => None,
    })
}
