//! What happened, as one number to compare runs by and, when asked for, as lines to read.

use ashlar_format::drive_label::MemberLayout;
use ashlar_reactor::op::Op;

/// Kind, offset and length of an operation.
pub fn place(op: &Op) -> (&'static str, u64, u64) {
    match op {
        Op::Read { offset, into, .. } => ("read", *offset, into.len() as u64),
        Op::Write { offset, from, .. } => ("write", *offset, from.len() as u64),
        Op::Flush { .. } => ("flush", 0, 0),
        Op::WriteZeroes { offset, len, .. } => ("zero", *offset, *len),
        Op::Descriptor { .. } => ("poll", 0, 0),
    }
}

pub struct Trace {
    lines: bool,
    hash: u64,
    /// Of every drive.
    pub areas: Option<MemberLayout>,
    pub chunk_bytes: u64,
}

impl Trace {
    pub fn new(lines: bool) -> Trace {
        Trace { lines, hash: 0xcbf2_9ce4_8422_2325, areas: None, chunk_bytes: 16 << 10 }
    }

    /// Depends on every operation, its time and its outcome, in order.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    pub fn mix(&mut self, number: u64) {
        self.hash = (self.hash ^ number).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    }

    /// An operation completed. `errno`: it failed.
    pub fn op(&mut self, now_ns: u64, op: (u32, &str, u64, u64), errno: Option<i32>) {
        let (drive, kind, offset, len) = op;
        self.mix(now_ns);
        self.mix(u64::from(drive) << 56 ^ offset << 20 ^ len);
        self.mix(u64::from(kind.as_bytes()[0]) ^ u64::from(errno.unwrap_or(0).unsigned_abs()) << 8);
        if self.lines {
            let area = if kind == "flush" { String::new() } else { self.area(offset, len) };
            let failed = errno.map_or(String::new(), |errno| format!("  errno {errno}"));
            println!("{:>12} us  d{drive} {kind:<5} {area}{failed}", now_ns / 1000);
        }
    }

    pub fn note(&mut self, now_ns: u64, text: impl FnOnce() -> String) {
        if self.lines {
            println!("{:>12} us  {}", now_ns / 1000, text());
        }
    }

    /// Says what stands at `offset` of a drive.
    fn area(&self, offset: u64, len: u64) -> String {
        let Some(layout) = self.areas else {
            return offset.to_string();
        };
        let names = [
            "superblock",
            "dirty map",
            "written map",
            "volume table",
            "missed map",
            "bad blocks",
            "lease",
            "journal",
            "checksums",
            "data",
        ];
        for (area, name) in layout.areas().into_iter().zip(names) {
            if !area.range().contains(&offset) {
                continue;
            }
            let at = offset - area.offset;
            return match name {
                "superblock" | "dirty map" | "written map" | "missed map" => {
                    format!("{name} slot {} +{len}", at / 4096)
                }
                "data" => {
                    let (stripe, row) = (at / self.chunk_bytes, at % self.chunk_bytes);
                    format!("data stripe {stripe} row {row} +{len}")
                }
                _ => format!("{name} {at} +{len}"),
            };
        }
        format!("label {offset} +{len}")
    }
}
