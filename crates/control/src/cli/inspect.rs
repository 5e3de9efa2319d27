//! `ashlar inspect DRIVE`

use std::path::PathBuf;

use clap::Args;

use crate::cli::output::{Output, or_dash, rows, show, table};
use crate::inspect::{Report, SuperblockReport, inspect};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

#[derive(Args)]
pub struct Inspect {
    /// A block device or file
    #[arg(value_hint = clap::ValueHint::FilePath)]
    drive: PathBuf,
}

/// The status is 1 if no copy of the label is good.
pub fn run(command: &Inspect, output: Output) -> Answer<()> {
    let report = inspect(&command.drive)?;
    show(output, &report, text)?;
    if report.label.is_some() {
        return Ok(());
    }
    Err(Refusal::failed(format!("{} has no Ashlar label that can be believed", report.path))
        .fix(report.fix))
}

fn text(report: &Report) -> String {
    let mut parts = vec![format!(
        "drive    {}\nsize     {} ({} bytes)\ncontent  {}",
        report.path,
        Size(report.bytes),
        report.bytes,
        report.content
    )];
    if let Some(label) = &report.label {
        let mut areas = table(&["AREA", "OFFSET>", "SIZE>"]);
        for area in &label.areas {
            areas.add_row([
                area.name.to_owned(),
                area.offset.to_string(),
                Size(area.bytes).to_string(),
            ]);
        }
        parts.push(format!(
            "uuid     {}\narray    {}\nmember   {} when it was labelled\nuses     {} bytes",
            label.drive, label.array, label.member, label.drive_bytes
        ));
        parts.push(rows(&areas, ""));
    }
    parts.push(copies(report));
    parts.extend(report.superblock.as_ref().map(superblock));
    parts.extend(volumes(report));
    if let Some(dirty) = &report.dirty_map {
        parts.push(format!(
            "dirty map: {} regions dirty, {} of {} pages without a good copy",
            dirty.regions_dirty, dirty.pages_bad, dirty.pages
        ));
    }
    parts.extend(report.lease.as_ref().map(|lease| match lease.host {
        Some(host) => {
            format!(
                "lease: host {} ({host}), epoch {}, beat {}",
                lease.host_name, lease.epoch, lease.beat
            )
        }
        None => format!("lease: free, epoch {}", lease.epoch),
    }));
    parts.join("\n\n")
}

fn copies(report: &Report) -> String {
    let mut shown = table(&["RECORD", "OFFSET>", "SEQUENCE>", "VERDICT"]);
    for copy in &report.copies {
        shown.add_row([
            copy.record.to_owned(),
            copy.offset.to_string(),
            or_dash(copy.sequence),
            copy.flaw.clone().unwrap_or_else(|| "ok".to_owned()),
        ]);
    }
    rows(&shown, "")
}

fn superblock(its: &SuperblockReport) -> String {
    let mut shown = table(&["MEMBER>", "STATE", "CURRENT>", "UUID"]);
    for member in &its.members {
        let this = if member.index == usize::from(its.member) { " (this drive)" } else { "" };
        shown.add_row([
            member.index.to_string(),
            member.state.to_owned(),
            format!("{} %", member.rebuilt_percent),
            format!("{}{this}", member.drive),
        ]);
    }
    format!(
        "array {}: RAID {}, {} groups, {} data and {} parity chunks of {}, {} copies, {} stripes, \
         generation {}\n{}",
        its.name,
        its.level,
        its.groups,
        its.data_chunks,
        its.parity_chunks,
        Size(its.chunk_bytes.into()),
        its.copies,
        its.stripes,
        its.generation,
        rows(&shown, "")
    )
}

fn volumes(report: &Report) -> Option<String> {
    let mut shown = table(&["VOLUME", "SIZE>", "RANGES>", "UUID"]);
    for volume in report.volumes.as_ref()? {
        shown.add_row([
            volume.name.clone(),
            Size(volume.bytes).to_string(),
            volume.extents.len().to_string(),
            volume.uuid.to_string(),
        ]);
    }
    Some(rows(&shown, "no volumes"))
}
