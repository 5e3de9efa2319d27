//! Whether a drive can take the place of a member.

use ashlar_raid::needs::Unfit;
use uuid::Uuid;

use crate::host::show::Snapshots;
use crate::host::{Attached, Host, translate};
use crate::refusal::{Answer, Refusal};
use crate::snapshot::ArraySnapshot;

impl Host {
    /// Refuses a drive that cannot become a member, before the old one is pulled for it.
    pub(super) fn check_replacement(&self, array: &ArraySnapshot, drive: &str) -> Answer<()> {
        refused(array, drive, &self.attached(drive)?).map_or(Ok(()), Err)
    }

    /// The same of drives that shall be members beside those that are there.
    pub(super) fn check_added(&self, array: &ArraySnapshot, drives: &[String]) -> Answer<()> {
        drives
            .iter()
            .try_for_each(|drive| misfit(array, drive, &self.attached(drive)?).map_or(Ok(()), Err))
    }

    /// Why a spare could never take over: in the array that it is kept for, or in any. `None`: it
    /// could, or not all is known: an array that does not run does not say what it needs.
    pub(super) fn unfit(
        &self,
        array: Option<Uuid>,
        snapshots: &Snapshots,
        name: &str,
        drive: &Attached,
    ) -> Option<Refusal> {
        let known = |uuid: &Uuid| snapshots.get(uuid).and_then(|its| its.as_ref().ok());
        if let Some(array) = array {
            return refused(known(&array)?, name, drive);
        }
        let uuids: Vec<Uuid> = self.look(|state| state.catalog.arrays.keys().copied().collect());
        let arrays: Vec<&ArraySnapshot> = uuids.iter().map(known).collect::<Option<_>>()?;
        let could_need = arrays.into_iter().filter(|array| array.redundancy() > 0);
        let refusals = could_need.map(|array| refused(array, name, drive));
        let first = refusals.collect::<Option<Vec<Refusal>>>()?.into_iter().next()?;
        Some(Refusal { error: format!("no array could use it: {}", first.error), ..first })
    }
}

/// Why a drive cannot become a member; `None`: it can.
fn refused(array: &ArraySnapshot, name: &str, drive: &Attached) -> Option<Refusal> {
    if array.redundancy() == 0 {
        let text = format!("array {} has level 0: nothing of it can be rebuilt", array.name);
        let fix = "make a new array, and copy what can still be read";
        return Some(Refusal::conflict(text).fix(fix));
    }
    misfit(array, name, drive)
}

/// The same, whether anything can be rebuilt or not.
fn misfit(array: &ArraySnapshot, name: &str, drive: &Attached) -> Option<Refusal> {
    let (bytes, sector_bytes, needs) = (drive.bytes(), drive.sector_bytes(), &array.needs);
    let refusal = match needs.layout_on(bytes, sector_bytes).err()? {
        Unfit::TooSmall => translate::too_small(&array.name, name, bytes, needs.data_bytes),
        Unfit::Sectors => {
            let most = needs.sector_bytes;
            Refusal::conflict(format!(
                "drive {name} has sectors of {sector_bytes} bytes, array {} runs with {most}",
                array.name
            ))
            .fix(format!(
                "use a drive with sectors of {most} bytes; or format this one so (NVMe: `nvme \
                 format --lbaf`)"
            ))
        }
    };
    Some(refusal)
}
