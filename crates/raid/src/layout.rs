//! Pure geometry: from a byte of the array to stripe, position and place on a member, and back.
//!
//! A stripe has *positions*: for parity levels `0..k` are data chunks and `k..k+m` parity chunks;
//! for mirrors position `chunk * copies + copy`. Positions rotate over members on parity levels
//! (left-symmetric), so that parity load is even. A *row* is a byte offset inside a chunk; parity
//! of a row depends only on that row of the data chunks.
//!
//! ```text
//! RAID 5 of 4+1, left-symmetric:      member 0   1   2   3   4
//!                           stripe 0        D0  D1  D2  D3  P
//!                           stripe 1        D1  D2  D3  P   D0
//!                           stripe 2        D2  D3  P   D0  D1
//! ```

use std::ops::Range;

use ashlar_format::array_superblock::{Level, MEMBERS_MAX};
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};

pub const CHUNK_BYTES_MIN: u32 = 16 << 10;
pub const CHUNK_BYTES_MAX: u32 = 1 << 20;

/// Positions of one stripe as bits: bit `p` is position `p`.
pub type Positions = u64;
const _: () = assert!(MEMBERS_MAX <= Positions::BITS as usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub level: Level,
    pub data: u8,
    pub parity: u8,
    pub copies: u8,
    pub chunk_bytes: u32,
    pub stripes: u64,
}

/// A byte range inside one data chunk of one stripe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    pub stripe: StripeIndex,
    pub chunk: u8,
    pub rows: Range<u32>,
    /// Where it is in the request, in bytes.
    pub at: usize,
}

impl Piece {
    pub fn len(&self) -> usize {
        (self.rows.end - self.rows.start) as usize
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Its bytes in the request.
    pub fn in_request(&self) -> Range<usize> {
        self.at..self.at + self.len()
    }
}

impl Layout {
    /// The layout of `members` drives; an error says what does not fit.
    pub fn new(level: Level, members: usize, copies: u8, chunk_bytes: u32) -> Result<Self, String> {
        if !chunk_bytes.is_power_of_two()
            || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes)
        {
            return Err("the chunk must be a power of two from 16K to 1M".into());
        }
        let count = u8::try_from(members).ok().filter(|n| usize::from(*n) <= MEMBERS_MAX);
        let count = count.ok_or(format!("an array has at most {MEMBERS_MAX} members"))?;
        let copies = match (level, copies) {
            (Level::Raid1, 0) => count,
            (Level::Raid10, 0) => 2,
            (Level::Raid0 | Level::Raid5 | Level::Raid6, 0 | 1) => 1,
            (Level::Raid0 | Level::Raid5 | Level::Raid6, _) => {
                return Err("copies are for levels 1 and 10".into());
            }
            (Level::Raid1 | Level::Raid10, copies) => copies,
        };
        let (least, name) = match level {
            Level::Raid0 => (1, "0"),
            Level::Raid1 => (2, "1"),
            Level::Raid5 => (3, "5"),
            Level::Raid6 => (4, "6"),
            Level::Raid10 => (4, "10"),
        };
        if count < least {
            return Err(format!("level {name} needs at least {least} drives, not {count}"));
        }
        let mirrored = matches!(level, Level::Raid1 | Level::Raid10);
        if mirrored && (copies < 2 || !count.is_multiple_of(copies)) {
            return Err(format!("{count} drives cannot hold {copies} copies of everything"));
        }
        if level == Level::Raid1 && copies != count {
            return Err("level 1 keeps a copy on every drive; level 10 stripes over copies".into());
        }
        let parity = level.parity();
        let data = (count - parity) / copies;
        Ok(Layout { level, data, parity, copies, chunk_bytes, stripes: 0 })
    }

    pub fn members(&self) -> usize {
        usize::from(self.data) * usize::from(self.copies) + usize::from(self.parity)
    }

    /// Positions of a stripe; as many as members.
    pub fn positions(&self) -> u8 {
        self.data * self.copies + self.parity
    }

    pub fn is_mirrored(&self) -> bool {
        self.copies > 1
    }

    /// Whether members hold anything about each other's data.
    pub fn is_redundant(&self) -> bool {
        self.copies > 1 || self.parity > 0
    }

    /// Bytes of data in one stripe.
    pub fn stripe_bytes(&self) -> u64 {
        u64::from(self.data) * u64::from(self.chunk_bytes)
    }

    /// Bytes of data in the array.
    pub fn capacity(&self) -> u64 {
        self.stripes * self.stripe_bytes()
    }

    /// The member that holds `position` of `stripe`.
    pub fn member_at(&self, stripe: StripeIndex, position: u8) -> MemberIndex {
        assert!(position < self.positions());
        if self.parity == 0 {
            return MemberIndex(position);
        }
        let n = u64::from(self.positions());
        let first_parity = n - 1 - stripe.0 % n;
        let turned = if position < self.data {
            u64::from(self.parity) + u64::from(position)
        } else {
            u64::from(position - self.data)
        };
        MemberIndex::new(to_usize((first_parity + turned) % n))
    }

    /// The position of `stripe` that `member` holds: the inverse of `member_at`.
    pub fn position_of(&self, stripe: StripeIndex, member: MemberIndex) -> u8 {
        assert!(member.0 < self.positions());
        if self.parity == 0 {
            return member.0;
        }
        let n = u64::from(self.positions());
        let first_parity = n - 1 - stripe.0 % n;
        let turned = (u64::from(member.0) + n - first_parity) % n;
        let position = if turned < u64::from(self.parity) {
            turned + u64::from(self.data)
        } else {
            turned - u64::from(self.parity)
        };
        MemberIndex::new(to_usize(position)).0
    }

    /// Positions that hold a copy of data chunk `chunk`.
    pub fn data_positions(&self, chunk: u8) -> Range<u8> {
        chunk * self.copies..(chunk + 1) * self.copies
    }

    pub fn parity_positions(&self) -> Range<u8> {
        self.positions() - self.parity..self.positions()
    }

    /// Byte offset of a row in the data area of any member.
    pub fn member_offset(&self, stripe: StripeIndex, row: u32) -> u64 {
        stripe.0 * u64::from(self.chunk_bytes) + u64::from(row)
    }

    /// Whether `offset..offset + len` is inside the array and of whole sectors.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        (offset | len).is_multiple_of(512) && end.is_some_and(|end| end <= self.capacity())
    }

    /// Cuts a byte range into pieces that each lie in one chunk, in order.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<> {
        let layout = *self;
        let chunk_bytes = u64::from(self.chunk_bytes);
        let mut done = 0;
        std::iter::from_fn(move || {
            if done == len {
                return None;
            }
            let at = offset + done;
            let row = at % chunk_bytes;
            let part = (chunk_bytes - row).min(len - done);
            let chunk = (at / chunk_bytes) % u64::from(layout.data);
            let row32 = |row: u64| u32::try_from(row).expect("rows fit in a chunk");
            let piece = Piece {
                stripe: StripeIndex(at / layout.stripe_bytes()),
                chunk: MemberIndex::new(to_usize(chunk)).0,
                rows: row32(row)..row32(row + part),
                at: to_usize(done),
            };
            done += part;
            Some(piece)
        })
    }

    /// Whether every block can be served when only `held` members can.
    pub fn survives(&self, held: &[bool]) -> bool {
        assert!(held.len() == self.members());
        if self.parity > 0 {
            return held.iter().filter(|held| !**held).count() <= usize::from(self.parity);
        }
        held.chunks(usize::from(self.copies)).all(|copies| copies.contains(&true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts() -> Vec<Layout> {
        let mut all = Vec::new();
        for level in Level::ALL {
            for members in 1..=9 {
                for copies in 0..=3 {
                    if let Ok(mut layout) = Layout::new(level, members, copies, 16 << 10) {
                        layout.stripes = 40;
                        all.push(layout);
                    }
                }
            }
        }
        all
    }

    #[test]
    fn every_byte_has_one_place() {
        for layout in layouts() {
            let mut seen = std::collections::BTreeSet::new();
            let chunk = u64::from(layout.chunk_bytes);
            for piece in layout.pieces(0, layout.capacity()) {
                assert_eq!(u64::from(piece.rows.end - piece.rows.start), chunk);
                for position in layout.data_positions(piece.chunk) {
                    let member = layout.member_at(piece.stripe, position);
                    assert_eq!(layout.position_of(piece.stripe, member), position);
                    assert!(seen.insert((member, layout.member_offset(piece.stripe, 0))));
                }
            }
            for stripe in 0..layout.stripes {
                for position in layout.parity_positions() {
                    let member = layout.member_at(StripeIndex(stripe), position);
                    assert!(seen.insert((member, stripe * chunk)));
                }
            }
            let places = layout.members() as u64 * layout.stripes;
            assert_eq!(seen.len() as u64, places, "{layout:?} uses every chunk once");
        }
    }

    #[test]
    fn pieces_cover_a_request_in_order() {
        let mut layout = Layout::new(Level::Raid5, 5, 0, 16 << 10).unwrap();
        layout.stripes = 10;
        for (offset, len) in [(0, 512), (512, 16 << 10), (65_024, 1024), (1536, 200 << 10)] {
            let pieces: Vec<_> = layout.pieces(offset, len).collect();
            let mut at = 0;
            for piece in &pieces {
                assert_eq!(piece.at, at);
                at += piece.len();
            }
            assert_eq!(at as u64, len);
        }
    }

    #[test]
    fn parity_moves_over_all_members() {
        let layout = Layout::new(Level::Raid6, 6, 0, 64 << 10).unwrap();
        for position in layout.parity_positions() {
            let homes: std::collections::BTreeSet<_> =
                (0..6).map(|s| layout.member_at(StripeIndex(s), position)).collect();
            assert_eq!(homes.len(), 6);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        for (level, members, copies, chunk) in [
            (Level::Raid5, 2, 0, 65536),
            (Level::Raid6, 3, 0, 65536),
            (Level::Raid10, 5, 0, 65536),
            (Level::Raid10, 6, 4, 65536),
            (Level::Raid1, 4, 2, 65536),
            (Level::Raid0, 65, 0, 65536),
            (Level::Raid0, 2, 2, 65536),
            (Level::Raid5, 5, 0, 65537),
            (Level::Raid5, 5, 0, 8192),
            (Level::Raid5, 5, 0, 2 << 20),
        ] {
            assert!(Layout::new(level, members, copies, chunk).is_err(), "{level:?} {members}");
        }
    }
}
