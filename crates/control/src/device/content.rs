//! What a drive carries, so that nobody's data is overwritten by mistake.

use ashlar_format::array_superblock::ArraySuperblock;
use ashlar_format::record::RecordError;
use uuid::Uuid;

use crate::device::OpenDevice;
use crate::device::signature::{EDGE_BYTES, signature};
use crate::pages::read_pages;
use crate::survey::{self, Flaw, Medium};

/// The label of a drive, and what its superblock adds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    pub drive: Uuid,
    pub array: Uuid,
    /// `None` if no superblock can be read.
    pub array_name: Option<String>,
    pub member: u32,
    /// Bytes of the drive that the layout needs.
    pub drive_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Both ends are zero.
    Blank,
    Labelled(Labelled),
    /// It has an Ashlar label, but no copy of it can be believed, or they contradict each other.
    Damaged {
        why: String,
    },
    /// It has the label of a newer Ashlar.
    Newer {
        version: u16,
    },
    /// Someone else's data: what it looks like.
    Foreign(&'static str),
}

impl std::fmt::Display for Labelled {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let array = self.array.to_string();
        let array = self.array_name.as_deref().unwrap_or(&array);
        write!(f, "member {} of array {array}", self.member)
    }
}

impl Content {
    pub fn label(&self) -> Option<&Labelled> {
        match self {
            Content::Labelled(label) => Some(label),
            Content::Blank
            | Content::Damaged { .. }
            | Content::Newer { .. }
            | Content::Foreign(_) => None,
        }
    }
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Content::Blank => f.write_str("blank"),
            Content::Labelled(label) => label.fmt(f),
            Content::Damaged { why } => write!(f, "a damaged Ashlar label ({why})"),
            Content::Newer { version } => {
                write!(f, "a label of version {version}, by a newer Ashlar")
            }
            Content::Foreign(name) => f.write_str(name),
        }
    }
}

impl OpenDevice {
    /// The newest superblock; `None` if there is none that can be believed.
    pub fn superblock(&self) -> Option<Box<ArraySuperblock>> {
        let label = survey::read_label(self.medium()).newest?;
        survey::read_superblocks(self.medium(), &label).newest
    }

    pub fn content(&self) -> std::io::Result<Content> {
        content(self.medium())
    }
}

/// Looks at a drive; an error means that even its ends cannot be read.
pub fn content(medium: Medium<'_>) -> std::io::Result<Content> {
    // One that was cut short may have less.
    let edge = EDGE_BYTES.min(medium.bytes);
    let front = read_pages(medium.disk, 0, edge)?;
    let back = read_pages(medium.disk, medium.bytes - edge, edge)?;
    let copies = survey::read_label(medium);
    let flaws = || copies.copies.iter().filter(|copy| copy.has_magic);
    if let Some(version) = flaws().find_map(newer_version) {
        return Ok(Content::Newer { version });
    }
    if survey::labels_disagree(medium, &copies) {
        return Ok(Content::Damaged { why: "its copies name different arrays".to_owned() });
    }
    if let Some(label) = &copies.newest {
        let superblock = survey::read_superblocks(medium, label).newest;
        let name = superblock.as_ref().and_then(|found| found.name().ok()).map(str::to_owned);
        return Ok(Content::Labelled(Labelled {
            drive: Uuid::from_bytes(label.header.owner),
            array: Uuid::from_bytes(label.array),
            array_name: name,
            member: label.member.get(),
            drive_bytes: label.drive_bytes.get(),
        }));
    }
    if let Some(copy) = flaws().next() {
        let why = copy.found.as_ref().err().map(Flaw::to_string).unwrap_or_default();
        return Ok(Content::Damaged { why });
    }
    Ok(signature(front.bytes(), back.bytes()).map_or(Content::Blank, Content::Foreign))
}

/// Of a copy that only a newer build can read.
fn newer_version(copy: &survey::Copy) -> Option<u16> {
    match &copy.found {
        Err(Flaw::Record(RecordError::Version(version))) => Some(*version),
        Ok(_) | Err(Flaw::Record(_) | Flaw::Unreadable(_)) => None,
    }
}
