//! Which machine this is, to others that reach the same drives.
//!
//! Invariant: it is the same one after the state directory was lost, where the system knows itself
//! (`/etc/machine-id`); else it is as lasting as the state directory.

use ashlar_raid::lease::Host;
use uuid::Uuid;

use crate::catalog::StateDirectory;
use crate::refusal::Answer;
use crate::remote::Initiator;

const MACHINE_ID: &str = "/etc/machine-id";
const STORED_ID: &str = "host-id";
/// The id of a machine is for itself: what others see is made from it by a hash, as machine-id(5)
/// asks.
const NAMESPACE: Uuid = Uuid::from_u128(0x6f0b_8a3c_54d1_4c0e_9a67_1c3f_08e2_7d55);

/// What it is called in leases, and by targets of NVMe/TCP. `chosen`: what the operator says it is.
pub fn host(chosen: Option<Uuid>, directory: &StateDirectory) -> Answer<(Host, Initiator)> {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let machine = std::fs::read_to_string(MACHINE_ID).ok();
    let uuid = match chosen.or_else(|| derived(machine.as_deref()?, &name)) {
        Some(uuid) => uuid,
        None => directory.keep_uuid(STORED_ID)?,
    };
    Ok((Host::new(uuid.into_bytes(), &name), Initiator(uuid)))
}

/// Machines that were made from one image may have one id; then their names differ.
fn derived(machine: &str, name: &str) -> Option<Uuid> {
    let machine = Uuid::try_parse(machine.trim()).ok().filter(|id| !id.is_nil())?;
    Some(Uuid::new_v5(&NAMESPACE, format!("{machine} {name}").as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_differ_by_id_and_name() {
        let id = "3d1219c7c4c5404aaa1f6d2a48adfda4\n";
        let other = "3d1219c7c4c5404aaa1f6d2a48adfda5\n";
        assert_eq!(derived(id, "a"), derived(id, "a"));
        assert_ne!(derived(id, "a"), derived(id, "b"));
        assert_ne!(derived(id, "a"), derived(other, "a"));
        for none in ["", "uninitialized\n", "00000000000000000000000000000000"] {
            assert_eq!(derived(none, "a"), None, "{none:?}");
        }
    }

    #[test]
    fn a_machine_that_does_not_know_itself_is_remembered() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        let first = directory.keep_uuid(STORED_ID).unwrap();
        assert!(!first.is_nil());
        assert_eq!(directory.keep_uuid(STORED_ID), Ok(first));
        std::fs::write(scratch.path().join(STORED_ID), "scribble").unwrap();
        let again = directory.keep_uuid(STORED_ID).unwrap();
        assert_eq!(directory.keep_uuid(STORED_ID), Ok(again));
    }

    #[test]
    fn the_operator_has_the_last_word() {
        let scratch = tempfile::tempdir().unwrap();
        let directory = StateDirectory::open(scratch.path()).unwrap();
        let chosen = Uuid::from_u128(7);
        let of = |chosen| host(chosen, &directory).unwrap();
        assert_eq!(of(Some(chosen)), of(Some(chosen)));
        assert_ne!(of(Some(chosen)), of(None));
    }
}
