//! Whether a drive can take the place of a member.

use ashlar_raid::label::plan_for;

use crate::host::{Attached, Host};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;
use crate::snapshot::ArraySnapshot;

impl Host {
    /// Refuses a drive that cannot become a member, before the old one is pulled for it.
    pub(super) fn check_replacement(&self, array: &ArraySnapshot, drive: &str) -> Answer<()> {
        refused(array, drive, &self.attached(drive)?).map_or(Ok(()), Err)
    }

    /// Refuses a spare that could never take over: for the array that it is kept for, or for all
    /// that run.
    pub(super) fn check_spare(
        &self,
        arrays: &[&ArraySnapshot],
        drive: &str,
        is_for_one: bool,
    ) -> Answer<()> {
        unfit(arrays, drive, &self.attached(drive)?, is_for_one).map_or(Ok(()), Err)
    }
}

/// Why a spare can take over in none of these arrays; `None`: it can in some, or there is none that
/// could need one.
pub(super) fn unfit(
    arrays: &[&ArraySnapshot],
    name: &str,
    drive: &Attached,
    is_for_one: bool,
) -> Option<Refusal> {
    let could_need = |array: &&&ArraySnapshot| is_for_one || array.redundancy() > 0;
    let refusals = arrays.iter().filter(could_need).map(|array| refused(array, name, drive));
    let refusals: Vec<Refusal> = refusals.collect::<Option<_>>()?;
    let first = refusals.into_iter().next()?;
    let whose = if is_for_one { "" } else { "no array that runs could use it: " };
    Some(Refusal { error: format!("{whose}{}", first.error), ..first })
}

/// Why a drive cannot become a member; `None`: it can.
fn refused(array: &ArraySnapshot, name: &str, drive: &Attached) -> Option<Refusal> {
    if array.redundancy() == 0 {
        let text = format!("array {} has level 0: nothing of it can be rebuilt", array.name);
        let fix = "make a new array, and copy what can still be read";
        return Some(Refusal::conflict(text).fix(fix));
    }
    let (has, needs) = (drive.bytes(), array.member_data_bytes());
    let room = plan_for(has, array.parity_chunks, array.integrity).map_or(0, |its| its.data.len);
    if room < needs {
        let (has, needs) = (Size(has), Size(needs));
        return Some(
            Refusal::conflict(format!(
                "drive {name} is too small: it has {has}, a member of array {} holds {needs} of \
                 data, and what it takes to keep that",
                array.name
            ))
            .fix("use a drive that is as large as the others"),
        );
    }
    let (has, most) = (drive.sector_bytes(), array.sector_bytes);
    (has > most).then(|| {
        Refusal::conflict(format!(
            "drive {name} has sectors of {has} bytes, array {} runs with {most}",
            array.name
        ))
        .fix(format!(
            "use a drive with sectors of {most} bytes; or format this one so (NVMe: `nvme format \
             --lbaf`)"
        ))
    })
}
