//! What a drive carries, so that nobody's data is overwritten by mistake.

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
    /// It has an Ashlar label, but no copy of it can be believed.
    Damaged {
        why: String,
    },
    /// Someone else's data: what it looks like.
    Foreign(&'static str),
}

impl std::fmt::Display for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Content::Blank => f.write_str("blank"),
            Content::Labelled(label) => {
                let array = label.array.to_string();
                let array = label.array_name.as_deref().unwrap_or(&array);
                write!(f, "member {} of array {array}", label.member)
            }
            Content::Damaged { why } => write!(f, "a damaged Ashlar label ({why})"),
            Content::Foreign(name) => f.write_str(name),
        }
    }
}

impl OpenDevice {
    pub fn content(&self) -> std::io::Result<Content> {
        content(self.medium())
    }
}

/// Looks at a drive; an error means that even its ends cannot be read.
pub fn content(medium: Medium<'_>) -> std::io::Result<Content> {
    let front = read_pages(medium.file, 0, EDGE_BYTES)?;
    let back = read_pages(medium.file, medium.bytes - EDGE_BYTES, EDGE_BYTES)?;
    let copies = survey::read_label(medium);
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
    if let Some(copy) = copies.copies.iter().find(|copy| copy.has_magic) {
        let why = copy.found.as_ref().err().map(Flaw::to_string).unwrap_or_default();
        return Ok(Content::Damaged { why });
    }
    Ok(signature(front.bytes(), back.bytes()).map_or(Content::Blank, Content::Foreign))
}
