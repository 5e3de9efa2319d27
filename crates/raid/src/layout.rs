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

use ashlar_format::array_superblock::{Level, MEMBERS_MAX, PARITY_MAX, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};

pub const CHUNK_BYTES_MIN: u32 = 16 << 10;
pub const CHUNK_BYTES_MAX: u32 = 1 << 20;

/// Positions of one stripe as bits: bit `p` is position `p`.
pub type Positions = u64;
const _: () = assert!(MEMBERS_MAX <= Positions::BITS as usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    pub level: Level,
    /// Data and parity chunks in a stripe.
    pub data: u8,
    pub parity: u8,
    pub copies: u8,
    /// Groups of members; stripe `s` is on group `s % groups`.
    pub groups: u8,
    pub chunk_bytes: u32,
    /// Of all groups together.
    pub stripes: u64,
}

/// What an operator chooses beside the level. Zero: the usual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    /// Copies of each chunk, for levels 1 and 10.
    pub copies: u8,
    /// Parity chunks, for level N+M.
    pub parity: u8,
    /// Members of one group, for levels 50, 60 and 70.
    pub group_members: u8,
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
    /// The layout of `members` drives, with no stripes yet; an error says what does not fit.
    pub fn new(
        level: Level,
        members: usize,
        shape: Shape,
        chunk_bytes: u32,
    ) -> Result<Self, String> {
        if !chunk_bytes.is_power_of_two()
            || !(CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk_bytes)
        {
            return Err("the chunk must be a power of two from 16K to 1M".into());
        }
        let count = u8::try_from(members).ok().filter(|n| usize::from(*n) <= MEMBERS_MAX);
        let count = count.ok_or(format!("an array has at most {MEMBERS_MAX} members"))?;
        let name = level_name(level);
        if count < least_members(level) {
            let least = least_members(level);
            return Err(format!("level {name} needs at least {least} drives, not {count}"));
        }
        if shape.copies > 1 && !level.is_mirrored() {
            return Err("copies are for levels 1 and 10".into());
        }
        if shape.parity > 0 && level != Level::RaidNm {
            return Err(format!("level {name} has its own count of parity chunks"));
        }
        if shape.group_members > 0 && !level.is_grouped() {
            return Err("groups are for levels 50, 60 and 70".into());
        }
        let copies = match (level, shape.copies) {
            (Level::Raid1, 0) => count,
            (Level::Raid10, 0) => 2,
            (_, 0) => 1,
            (_, copies) => copies,
        };
        if level.is_mirrored() && (copies < 2 || !count.is_multiple_of(copies)) {
            return Err(format!("{count} drives cannot hold {copies} copies of everything"));
        }
        if level == Level::Raid1 && copies != count {
            return Err("level 1 keeps a copy on every drive; level 10 stripes over copies".into());
        }
        let parity = level.parity().unwrap_or(shape.parity);
        if level == Level::RaidNm && !(1..=PARITY_MAX).contains(&parity) {
            return Err(format!("an N+M level has 1 to {PARITY_MAX} parity chunks"));
        }
        let group = match shape.group_members {
            0 if level.is_grouped() => count / 2,
            0 => count,
            group => group,
        };
        if !count.is_multiple_of(group) || level.is_grouped() && count / group < 2 {
            return Err(format!("{count} drives do not form groups of {group}"));
        }
        if group < parity + level_data_min(level) {
            return Err(format!("a group of {group} drives is too small for level {name}"));
        }
        let (groups, data) = (count / group, (group - parity) / copies);
        Ok(Layout { level, data, parity, copies, groups, chunk_bytes, stripes: 0 })
    }

    pub fn members(&self) -> usize {
        usize::from(self.groups) * usize::from(self.positions())
    }

    /// Positions of a stripe; as many as members of a group.
    pub fn positions(&self) -> u8 {
        self.data * self.copies + self.parity
    }

    /// Members that stand for each other: with the same copies of a mirror, or of a parity group.
    /// Those of a set are neighbours.
    pub fn set_members(&self) -> u8 {
        if self.is_mirrored() { self.copies } else { self.positions() }
    }

    /// Which of these sets a member is of, counted from zero.
    pub fn set_of(&self, index: MemberIndex) -> usize {
        index.index() / usize::from(self.set_members())
    }

    /// Stripes that each member holds a chunk of.
    pub fn member_stripes(&self) -> u64 {
        self.stripes / u64::from(self.groups)
    }

    /// Members of one group that may be lost, wherever they are.
    pub fn tolerated(&self) -> u8 {
        self.parity + self.copies - 1
    }

    /// What is durable before a write is acknowledged, unless an operator says otherwise.
    pub fn default_policy(&self) -> Policy {
        match (self.parity, self.copies) {
            (1.., _) => Policy::Journal,
            (0, 2..) => Policy::Bitmap,
            (0, _) => Policy::None,
        }
    }

    /// An error says why a policy is not for this layout.
    pub fn check_policy(&self, policy: Policy) -> Result<(), String> {
        if policy == Policy::None || self.is_redundant() {
            return Ok(());
        }
        Err("level 0 has nothing that could disagree after a crash: its policy is none".into())
    }

    /// Members of the group that holds `stripe`.
    pub fn group_of(&self, stripe: StripeIndex) -> Range<usize> {
        let size = usize::from(self.positions());
        let first = to_usize(stripe.0 % u64::from(self.groups)) * size;
        first..first + size
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
        let (group, in_group) = self.in_group(stripe);
        let first_parity = n - 1 - in_group % n;
        let turned = if position < self.data {
            u64::from(self.parity) + u64::from(position)
        } else {
            u64::from(position - self.data)
        };
        let place = first_parity + turned;
        let place = if place < n { place } else { place - n };
        MemberIndex::new(to_usize(group * n + place))
    }

    /// The group that holds `stripe`, and which of the group's stripes it is.
    fn in_group(&self, stripe: StripeIndex) -> (u64, u64) {
        // Most arrays have one: no division.
        if self.groups == 1 {
            return (0, stripe.0);
        }
        let groups = u64::from(self.groups);
        (stripe.0 % groups, stripe.0 / groups)
    }

    /// The position of `stripe` that `member` holds, the inverse of `member_at`; `None` if the
    /// stripe is on others.
    pub fn position_of(&self, stripe: StripeIndex, member: MemberIndex) -> Option<u8> {
        if self.parity == 0 {
            return Some(member.0).filter(|position| *position < self.positions());
        }
        let group = self.group_of(stripe);
        let inner = member.index().checked_sub(group.start).filter(|m| *m < group.len())?;
        let n = u64::from(self.positions());
        let first_parity = n - 1 - stripe.0 / u64::from(self.groups) % n;
        let turned = (inner as u64 + n - first_parity) % n;
        let position = if turned < u64::from(self.parity) {
            turned + u64::from(self.data)
        } else {
            turned - u64::from(self.parity)
        };
        Some(MemberIndex::new(to_usize(position)).0)
    }

    /// The bytes of a member's data area that belong to `stripes`; empty if none do.
    pub fn member_range(&self, stripes: Range<u64>, member: MemberIndex) -> Range<u64> {
        let groups = u64::from(self.groups);
        let group = (member.index() / usize::from(self.positions())) as u64;
        // Stripes below `end` that are on the group: 10 stripes, 3 groups: 4 on the first.
        let below = |end: u64| (end + groups - 1 - group) / groups;
        let chunk = u64::from(self.chunk_bytes);
        below(stripes.start) * chunk..below(stripes.end) * chunk
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
        self.in_group(stripe).1 * u64::from(self.chunk_bytes) + u64::from(row)
    }

    /// Offset in the array of a row of a data chunk.
    pub fn array_offset(&self, stripe: StripeIndex, chunk: u8, row: u32) -> u64 {
        let in_stripe = u64::from(chunk) * u64::from(self.chunk_bytes) + u64::from(row);
        stripe.0 * self.stripe_bytes() + in_stripe
    }

    /// Whether `offset..offset + len` is inside the array and of whole sectors.
    pub fn contains(&self, offset: u64, len: u64) -> bool {
        let end = offset.checked_add(len);
        (offset | len).is_multiple_of(512) && end.is_some_and(|end| end <= self.capacity())
    }

    /// Cuts a byte range into pieces that each lie in one chunk, in order.
    pub fn pieces(&self, offset: u64, len: u64) -> impl Iterator<Item = Piece> + use<> {
        let layout = *self;
        let mut done = 0;
        std::iter::from_fn(move || {
            let piece = layout.first_piece(offset + done, len - done)?;
            let at = to_usize(done);
            done += piece.len() as u64;
            Some(Piece { at, ..piece })
        })
    }

    /// The range as a piece, if it lies in one chunk and is not empty.
    pub fn one_piece(&self, offset: u64, len: u64) -> Option<Piece> {
        self.first_piece(offset, len).filter(|piece| piece.len() as u64 == len)
    }

    /// What of a byte range lies in the chunk that it begins in; `None`: the range is empty.
    fn first_piece(&self, offset: u64, len: u64) -> Option<Piece> {
        let chunk_bytes = u64::from(self.chunk_bytes);
        // A power of two: no division.
        let row = offset & (chunk_bytes - 1);
        let chunk = offset >> self.chunk_bytes.trailing_zeros();
        let part = (chunk_bytes - row).min(len);
        let data = u64::from(self.data);
        let row32 = |row: u64| u32::try_from(row).expect("rows fit in a chunk");
        (len > 0).then(|| Piece {
            stripe: StripeIndex(chunk / data),
            chunk: MemberIndex::new(to_usize(chunk % data)).0,
            rows: row32(row)..row32(row + part),
            at: 0,
        })
    }

    /// Whether the `held` members have every block that member `index` has.
    pub fn stands_for(&self, held: &[bool], index: MemberIndex) -> bool {
        assert!(held.len() == self.members());
        let set_members = if self.parity > 0 { self.positions() } else { self.copies };
        let set_members = usize::from(set_members);
        let first = index.index() / set_members * set_members;
        let others = (first..first + set_members).filter(|its| *its != index.index());
        let held = others.filter(|its| held[*its]).count();
        held >= if self.parity > 0 { set_members - usize::from(self.parity) } else { 1 }
    }

    /// Whether every block can be served when only `held` members can.
    pub fn survives(&self, held: &[bool]) -> bool {
        assert!(held.len() == self.members());
        if self.parity > 0 {
            let enough = |group: &[bool]| {
                group.iter().filter(|held| !**held).count() <= usize::from(self.parity)
            };
            return held.chunks(usize::from(self.positions())).all(enough);
        }
        held.chunks(usize::from(self.copies)).all(|copies| copies.contains(&true))
    }
}

/// As operators write it; of N+M levels without the numbers.
pub fn level_name(level: Level) -> &'static str {
    match level {
        Level::Raid0 => "0",
        Level::Raid1 => "1",
        Level::Raid5 => "5",
        Level::Raid6 => "6",
        Level::Raid7 => "7.3",
        Level::Raid10 => "10",
        Level::Raid50 => "50",
        Level::Raid60 => "60",
        Level::Raid70 => "70",
        Level::RaidNm => "n+m",
    }
}

/// Fewer data chunks in a stripe would be a mirror that costs more.
fn level_data_min(level: Level) -> u8 {
    match level {
        Level::Raid0 | Level::Raid1 | Level::RaidNm => 1,
        Level::Raid5 | Level::Raid6 | Level::Raid7 | Level::Raid10 => 2,
        Level::Raid50 | Level::Raid60 | Level::Raid70 => 2,
    }
}

fn least_members(level: Level) -> u8 {
    match level {
        Level::Raid0 => 1,
        Level::Raid1 | Level::RaidNm => 2,
        Level::Raid5 => 3,
        Level::Raid6 | Level::Raid10 => 4,
        Level::Raid7 => 5,
        Level::Raid50 => 6,
        Level::Raid60 => 8,
        Level::Raid70 => 10,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layouts() -> Vec<Layout> {
        let mut all = Vec::new();
        for level in Level::ALL {
            for members in 1..=12 {
                for number in 0..=4 {
                    let mut shape = Shape::default();
                    if level.is_mirrored() {
                        shape.copies = number;
                    } else if level.is_grouped() {
                        shape.group_members = number;
                    } else {
                        shape.parity = number;
                    }
                    if let Ok(mut layout) = Layout::new(level, members, shape, 16 << 10) {
                        layout.stripes = 40 * u64::from(layout.groups);
                        all.push(layout);
                    }
                }
            }
        }
        assert!(all.iter().any(|layout| layout.groups == 3));
        all
    }

    #[test]
    fn every_byte_has_one_place() {
        for layout in layouts() {
            let mut seen = std::collections::BTreeSet::new();
            let chunk = u64::from(layout.chunk_bytes);
            for piece in layout.pieces(0, layout.capacity()) {
                assert_eq!(u64::from(piece.rows.end - piece.rows.start), chunk);
                let back = layout.array_offset(piece.stripe, piece.chunk, piece.rows.start);
                assert_eq!(back, piece.at as u64);
                for position in layout.data_positions(piece.chunk) {
                    let member = layout.member_at(piece.stripe, position);
                    assert_eq!(layout.position_of(piece.stripe, member), Some(position));
                    assert!(seen.insert((member, layout.member_offset(piece.stripe, 0))));
                }
            }
            for stripe in 0..layout.stripes {
                for position in layout.parity_positions() {
                    let member = layout.member_at(StripeIndex(stripe), position);
                    let at = layout.member_offset(StripeIndex(stripe), 0);
                    assert!(seen.insert((member, at)));
                }
            }
            let places = layout.members() as u64 * layout.member_stripes();
            assert_eq!(seen.len() as u64, places, "{layout:?} uses every chunk once");
            assert!(seen.iter().all(|(_, at)| *at < layout.member_stripes() * chunk));
        }
    }

    #[test]
    fn pieces_cover_a_request_in_order() {
        let mut layout = Layout::new(Level::Raid5, 5, Shape::default(), 16 << 10).unwrap();
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
        let layout = Layout::new(Level::Raid6, 6, Shape::default(), 64 << 10).unwrap();
        for position in layout.parity_positions() {
            let homes: std::collections::BTreeSet<_> =
                (0..6).map(|s| layout.member_at(StripeIndex(s), position)).collect();
            assert_eq!(homes.len(), 6);
        }
    }

    /// Whatever stripes are taken, their bytes on a member are those of its chunks of them.
    #[test]
    fn stripes_are_contiguous_on_members() {
        for layout in layouts() {
            let chunk = u64::from(layout.chunk_bytes);
            for (start, end) in [(0, 1), (0, 7), (3, 4), (5, 19), (2, 2)] {
                for member in (0..layout.members()).map(MemberIndex::new) {
                    let held = (start..end).map(StripeIndex);
                    let held = held.filter(|stripe| layout.position_of(*stripe, member).is_some());
                    let mut range = layout.member_range(start..end, member);
                    for stripe in held {
                        assert_eq!(range.start, layout.member_offset(stripe, 0));
                        range.start += chunk;
                    }
                    assert!(range.is_empty());
                }
            }
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
            let shape = Shape { copies, ..Shape::default() };
            assert!(Layout::new(level, members, shape, chunk).is_err(), "{level:?} {members}");
        }
        for (level, members, parity, group_members) in [
            (Level::Raid50, 7, 0, 0),
            (Level::Raid50, 8, 0, 3),
            (Level::Raid60, 9, 0, 3),
            (Level::Raid70, 10, 0, 10),
            (Level::RaidNm, 10, 0, 0),
            (Level::RaidNm, 10, 9, 0),
            (Level::RaidNm, 4, 4, 0),
            (Level::Raid6, 6, 1, 0),
            (Level::Raid6, 6, 0, 3),
        ] {
            let shape = Shape { copies: 0, parity, group_members };
            let refused = Layout::new(level, members, shape, 65536).is_err();
            assert!(refused, "{level:?} {members} {shape:?}");
        }
    }
}
