//! `inspect`: everything Ashlar wrote on a drive, each copy with its verdict. Needs no daemon.

use std::fs::File;
use std::io::{Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use ashlar_format::array_superblock::{ArraySuperblock, MemberState};
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::lease::Lease;
use ashlar_format::record::Record;
use ashlar_format::units::Area;
use ashlar_format::volume_table::VolumeTable;
use serde::Serialize;
use uuid::Uuid;

use crate::device::content::{Content, content};
use crate::device::signature::EDGE_BYTES;
use crate::disk::Disk;
use crate::level::notation;
use crate::refusal::{Answer, Refusal};
use crate::snapshot::percent;
use crate::survey::{self, Copies, DirtySummary, Medium};

/// One place where a record should be.
#[derive(Debug, Serialize)]
pub struct CopyReport {
    pub record: &'static str,
    pub offset: u64,
    /// Why it is not to be believed; `null` for a good one.
    pub flaw: Option<String>,
    /// Sequence or generation of a good one.
    pub sequence: Option<u64>,
}

#[derive(Debug, Serialize)]
pub struct AreaReport {
    pub name: &'static str,
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Debug, Serialize)]
pub struct LabelReport {
    pub drive: Uuid,
    pub array: Uuid,
    pub member: u32,
    /// Bytes of the drive that the layout uses.
    pub drive_bytes: u64,
    pub areas: Vec<AreaReport>,
}

#[derive(Debug, Serialize)]
pub struct MemberReport {
    pub index: usize,
    pub drive: Uuid,
    /// `trusted`, `stale` or `rebuilding`.
    pub state: &'static str,
    pub rebuilt_percent: u8,
}

#[derive(Debug, Serialize)]
pub struct SuperblockReport {
    pub name: String,
    pub generation: u64,
    /// As operators write it, such as `5` or `10+4`.
    pub level: String,
    pub copies: u8,
    pub groups: u8,
    pub data_chunks: u8,
    pub parity_chunks: u8,
    pub chunk_bytes: u32,
    pub stripes: u64,
    /// The member that this drive is.
    pub member: u16,
    pub members: Vec<MemberReport>,
}

#[derive(Debug, Serialize)]
pub struct VolumeReport {
    pub name: String,
    pub uuid: Uuid,
    pub bytes: u64,
    /// Ranges of the array: offset and length.
    pub extents: Vec<(u64, u64)>,
}

/// Which host has the array.
#[derive(Debug, Serialize)]
pub struct LeaseReport {
    /// `null`: nobody.
    pub host: Option<Uuid>,
    pub host_name: String,
    pub epoch: u64,
    pub beat: u64,
}

#[derive(Debug, Serialize)]
pub struct DirtyReport {
    pub pages: u64,
    pub pages_bad: u64,
    pub regions_dirty: u64,
}

/// All that is known of a drive.
#[derive(Debug, Serialize)]
pub struct Report {
    pub path: String,
    pub bytes: u64,
    /// `blank`, `member … of …`, `ext4`, …
    pub content: String,
    /// Where no copy of the label can be believed: what to do.
    #[serde(skip)]
    pub fix: &'static str,
    pub copies: Vec<CopyReport>,
    pub label: Option<LabelReport>,
    pub superblock: Option<SuperblockReport>,
    pub volumes: Option<Vec<VolumeReport>>,
    pub dirty_map: Option<DirtyReport>,
    pub lease: Option<LeaseReport>,
}

/// Reads a drive; changes nothing, takes no lock.
pub fn inspect(path: &Path) -> Answer<Report> {
    let unreadable = |error: std::io::Error| {
        Refusal::failed(format!("{} cannot be read: {error}", path.display()))
    };
    let mut file = File::open(path).map_err(unreadable)?;
    if file.metadata().map_err(unreadable)?.is_dir() {
        return Err(Refusal::invalid(format!("{} is a directory", path.display()))
            .fix("name a file or block device"));
    }
    let bytes = file.seek(SeekFrom::End(0)).map_err(unreadable)?;
    if bytes < EDGE_BYTES {
        return Err(Refusal::failed(format!("{} has {bytes} bytes: too few", path.display()))
            .fix("a drive has at least 64M; was the file cut short?"));
    }
    let disk = Disk::File(Arc::new(file));
    let medium = Medium { disk: &disk, bytes };
    let content = content(medium).map_err(unreadable)?;
    let mut report = Report {
        path: path.display().to_string(),
        bytes,
        content: content.to_string(),
        fix: match content {
            Content::Newer { .. } => "use the `ashlar` that wrote it",
            Content::Damaged { .. }
            | Content::Labelled(_)
            | Content::Blank
            | Content::Foreign(_) => {
                "if it was a member, and the others of its array are well, replace it and rebuild"
            }
        },
        copies: Vec::new(),
        label: None,
        superblock: None,
        volumes: None,
        dirty_map: None,
        lease: None,
    };
    let labels = survey::read_label(medium);
    report.add_copies("label", &labels);
    let Some(label) = labels.newest else { return Ok(report) };
    let superblocks = survey::read_superblocks(medium, &label);
    report.add_copies("superblock", &superblocks);
    let superblock = superblocks.newest;
    report.superblock = superblock.as_ref().map(|superblock| superblock_report(superblock));
    let tables = survey::read_volume_table(medium, &label);
    report.add_copies("volume table", &tables);
    report.volumes = tables.newest.map(|table| volume_reports(&table));
    report.dirty_map = superblock.as_ref().map(|superblock| {
        let dirty = survey::read_dirty_map(medium, &label, superblock);
        let DirtySummary { pages, pages_bad, regions_dirty } = dirty;
        DirtyReport { pages, pages_bad, regions_dirty }
    });
    let leases = survey::read_lease(medium, &label);
    report.add_copies("lease", &leases);
    report.lease = leases.newest.map(|lease| lease_report(&lease));
    report.label = Some(label_report(&label));
    Ok(report)
}

impl Report {
    fn add_copies<T: Record>(&mut self, record: &'static str, copies: &Copies<T>) {
        self.copies.extend(copies.copies.iter().map(|copy| CopyReport {
            record,
            offset: copy.home,
            flaw: copy.found.as_ref().err().map(ToString::to_string),
            sequence: copy.found.as_ref().ok().copied(),
        }));
    }
}

fn label_report(label: &DriveLabel) -> LabelReport {
    let layout = label.layout();
    let area = |name, area: Area| AreaReport { name, offset: area.offset, bytes: area.len };
    LabelReport {
        drive: Uuid::from_bytes(label.header.owner),
        array: Uuid::from_bytes(label.array),
        member: label.member.get(),
        drive_bytes: label.drive_bytes.get(),
        areas: vec![
            area("superblocks", layout.superblocks),
            area("dirty map", layout.dirty_map),
            area("volume table", layout.volume_table),
            area("lease", layout.lease),
            area("journal", layout.journal),
            area("data", layout.data),
        ],
    }
}

fn superblock_report(superblock: &ArraySuperblock) -> SuperblockReport {
    let stripes = superblock.stripes.get();
    let members = superblock.members().iter().enumerate().map(|(index, member)| MemberReport {
        index,
        drive: Uuid::from_bytes(member.drive),
        state: match member.state() {
            Ok(MemberState::Trusted) => "trusted",
            Ok(MemberState::Stale) => "stale",
            Ok(MemberState::Rebuilding) => "rebuilding",
            Err(_) => "unknown",
        },
        rebuilt_percent: match member.state() {
            Ok(MemberState::Trusted) => 100,
            Ok(MemberState::Rebuilding) => {
                let ahead = superblock.rebuilt_ahead[index].stripes();
                percent(member.rebuilt_stripes.get() + (ahead.end - ahead.start), stripes)
            }
            Ok(MemberState::Stale) | Err(_) => 0,
        },
    });
    SuperblockReport {
        name: superblock.name().unwrap_or_default().to_owned(),
        generation: superblock.header.sequence.get(),
        level: superblock.level().map_or_else(
            |_| superblock.level.to_string(),
            |level| notation(level, superblock.data_chunks, superblock.parity_chunks),
        ),
        copies: superblock.copies,
        groups: superblock.groups,
        data_chunks: superblock.data_chunks,
        parity_chunks: superblock.parity_chunks,
        chunk_bytes: superblock.chunk_bytes.get(),
        stripes,
        member: superblock.member.get(),
        members: members.collect(),
    }
}

fn lease_report(lease: &Lease) -> LeaseReport {
    let host = Uuid::from_bytes(lease.host);
    LeaseReport {
        host: (!host.is_nil()).then_some(host),
        host_name: lease.host_name().unwrap_or_default().to_owned(),
        epoch: lease.epoch.get(),
        beat: lease.beat.get(),
    }
}

fn volume_reports(table: &VolumeTable) -> Vec<VolumeReport> {
    let volumes = table.volumes().iter().map(|volume| VolumeReport {
        name: volume.name().unwrap_or_default().to_owned(),
        uuid: Uuid::from_bytes(volume.uuid),
        bytes: volume.bytes.get(),
        extents: volume.extents().iter().map(|e| (e.offset.get(), e.len.get())).collect(),
    });
    volumes.collect()
}

#[cfg(test)]
mod tests;
