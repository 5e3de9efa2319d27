//! What is done about members that are away: they are waited for, taken back, or a spare takes
//! their place. Decisions only; `host/spares.rs` acts.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use ashlar_raid::needs::MemberNeeds;
use uuid::Uuid;

/// What an array needs of a spare.
#[derive(Clone, Copy, Debug)]
pub struct Needs {
    pub array: Uuid,
    /// All blocks are served, so that a member can be rebuilt. If not, a spare cannot help, and
    /// those come first whose drives hold what is lacking.
    pub rebuildable: bool,
    /// What a drive has to be to become a member.
    pub member: MemberNeeds,
    /// How long a member may be away.
    pub delay: Duration,
}

/// A member without a drive that answers, or with one that missed a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Away {
    pub member: u8,
    pub time: Duration,
    /// It holds what the others do not.
    pub is_needed: bool,
    /// Members that stripes lack where they lack this one.
    pub lacking: usize,
    /// Its own drive, attached again.
    pub returned: Option<String>,
}

/// A drive that is kept for this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    pub drive: String,
    /// `None`: for any array.
    pub array: Option<Uuid>,
    pub bytes: u64,
    pub sector_bytes: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decision {
    /// There is nothing that could be done.
    Leave,
    /// Its own drive is back.
    Rejoin(String),
    Wait {
        spare: String,
        left: Duration,
    },
    TakeOver(String),
}

/// One decision for each; no spare is promised to two. Members that were away for too long are
/// first, then those of stripes that lack most, then those that are away for longest.
pub fn decide(
    needs: &Needs,
    mut away: Vec<Away>,
    mut spares: Vec<Candidate>,
) -> BTreeMap<u8, Decision> {
    let order = |away: &Away| (away.time >= needs.delay, away.lacking, away.time);
    away.sort_by_key(|away| (Reverse(order(away)), away.member));
    let mut decide = |away: &Away| {
        if (needs.rebuildable || away.is_needed)
            && let Some(drive) = &away.returned
        {
            return Decision::Rejoin(drive.clone());
        }
        if !needs.rebuildable {
            return Decision::Leave;
        }
        let Some(best) = best(needs, &spares) else { return Decision::Leave };
        let spare = spares.remove(best).drive;
        match needs.delay.checked_sub(away.time) {
            None | Some(Duration::ZERO) => Decision::TakeOver(spare),
            Some(left) => Decision::Wait { spare, left },
        }
    };
    away.iter().map(|away| (away.member, decide(away))).collect()
}

/// The array's own before any other; the smallest that is large enough.
fn best(needs: &Needs, spares: &[Candidate]) -> Option<usize> {
    let fits = |spare: &Candidate| {
        spare.array.is_none_or(|array| array == needs.array)
            && needs.member.layout_on(spare.bytes, spare.sector_bytes).is_ok()
    };
    let fitting = spares.iter().enumerate().filter(|(_, spare)| fits(spare));
    let best = fitting.min_by_key(|(_, spare)| (spare.array.is_none(), spare.bytes, &spare.drive));
    best.map(|(index, _)| index)
}

#[cfg(test)]
mod tests {
    use ashlar_raid::label::plan_for;

    use super::*;

    const OURS: Uuid = Uuid::from_u128(1);
    const OTHER: Uuid = Uuid::from_u128(2);

    const MIB: u64 = 1 << 20;

    /// Of an array for which a drive of 100 MiB is just large enough.
    fn needs() -> Needs {
        let delay = Duration::from_secs(180);
        let areas = plan_for(100 * MIB, 1, false).unwrap();
        let member = MemberNeeds {
            data_bytes: areas.data.len,
            journal_bytes: areas.journal.len,
            sector_bytes: 4096,
            parity: 1,
            integrity: false,
        };
        Needs { array: OURS, rebuildable: true, member, delay }
    }

    fn away(seconds: u64, returned: Option<&str>) -> Away {
        let time = Duration::from_secs(seconds);
        Away {
            member: 0,
            time,
            is_needed: false,
            lacking: 1,
            returned: returned.map(str::to_owned),
        }
    }

    fn spare(drive: &str, array: Option<Uuid>, mib: u64, sector_bytes: u32) -> Candidate {
        Candidate { drive: drive.into(), array, bytes: mib * MIB, sector_bytes }
    }

    fn take_over(drive: &str) -> Decision {
        Decision::TakeOver(drive.into())
    }

    #[test]
    fn what_is_done_and_when() {
        let spares = vec![spare("s", None, 200, 512)];
        let wait =
            |seconds| Decision::Wait { spare: "s".into(), left: Duration::from_secs(seconds) };
        let lost = Needs { rebuildable: false, ..needs() };
        let at_once = Needs { delay: Duration::ZERO, ..needs() };
        let back = Decision::Rejoin("d1".into());
        for (needs, away, spares, decision) in [
            (needs(), away(0, None), &spares[..], wait(180)),
            (needs(), away(179, None), &spares, wait(1)),
            (needs(), away(180, None), &spares, take_over("s")),
            (needs(), away(9999, None), &spares, take_over("s")),
            (at_once, away(0, None), &spares, take_over("s")),
            (needs(), away(9999, None), &[], Decision::Leave),
            (needs(), away(3, Some("d1")), &spares, back.clone()),
            (needs(), away(9999, Some("d1")), &[], back.clone()),
            (lost, away(9999, None), &spares, Decision::Leave),
            (lost, away(9999, Some("d1")), &spares, Decision::Leave),
            (lost, Away { is_needed: true, ..away(3, Some("d1")) }, &spares, back.clone()),
            (lost, Away { is_needed: true, ..away(9999, None) }, &spares, Decision::Leave),
        ] {
            assert_eq!(decide(&needs, vec![away], spares.to_vec())[&0], decision);
        }
    }

    #[test]
    fn which_spare() {
        for (spares, best) in [
            (vec![spare("small", None, 99, 512)], None),
            (vec![spare("enough", None, 100, 512)], Some("enough")),
            (vec![spare("coarse", None, 200, 8192)], None),
            (vec![spare("theirs", Some(OTHER), 200, 512)], None),
            (vec![spare("b", None, 300, 512), spare("a", None, 200, 4096)], Some("a")),
            (vec![spare("b", None, 200, 512), spare("a", None, 200, 512)], Some("a")),
            (vec![spare("pool", None, 200, 512), spare("own", Some(OURS), 900, 512)], Some("own")),
            (vec![spare("pool", None, 200, 512), spare("own", Some(OURS), 90, 512)], Some("pool")),
        ] {
            let decision = best.map_or(Decision::Leave, take_over);
            assert_eq!(decide(&needs(), vec![away(999, None)], spares)[&0], decision);
        }
    }

    /// To where most is lacking first.
    #[test]
    fn no_spare_is_promised_twice() {
        let spares = vec![spare("a", None, 200, 512), spare("b", None, 300, 512)];
        let at = |member, lacking| Away { member, lacking, ..away(999, None) };
        for (lacking, decisions) in [
            ([1, 1, 1], [take_over("a"), take_over("b"), Decision::Leave]),
            ([1, 2, 2], [Decision::Leave, take_over("a"), take_over("b")]),
            ([1, 1, 2], [take_over("b"), Decision::Leave, take_over("a")]),
        ] {
            let away = (0..).zip(lacking).map(|(member, lacking)| at(member, lacking)).collect();
            let decided = decide(&needs(), away, spares.clone());
            assert_eq!(decided.into_values().collect::<Vec<_>>(), decisions);
        }
        // One that may still come back keeps no spare from one that is due.
        let at = |member, seconds, lacking| Away { member, lacking, ..away(seconds, None) };
        let decided = decide(&needs(), vec![at(0, 5, 2), at(1, 200, 1)], spares[..1].to_vec());
        assert_eq!(decided.into_values().collect::<Vec<_>>(), [Decision::Leave, take_over("a")]);
    }
}
