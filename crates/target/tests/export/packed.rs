//! Packed rings through the real socket, made by hand: stopped and started, left by a daemon that
//! was stopped or killed, and broken.

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use ashlar_target::vhost::VhostExport;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;

use crate::front_end::{
    FEATURES, FrontEnd, INDIRECT, MEMORY_BYTES, NEXT, RING_SIZE, WRITE, within,
};
use crate::rig::{Rig, SERIAL, socket_path};

pub const PACKED: u64 = FEATURES | 1 << 34;
const HEADER: u64 = 4 << 20;
const STATUS: u64 = HEADER + 32;
const DATA: u64 = 8 << 20;
const AVAILABLE: u16 = 1 << 7;
const USED: u16 = 1 << 15;
/// Where the device says when it wants to be kicked.
const DEVICE: u64 = 0x2000;
/// The base of a new ring, as front ends of 16 bits say it.
const NEW: u16 = 0x8000;

/// The driver's side of ring 0. Positions count descriptors and never wrap.
pub struct Packed {
    pub guest: FrontEnd,
    offered: u64,
    used: u64,
}

impl Packed {
    pub fn started(export: &VhostExport) -> Packed {
        let mut guest = FrontEnd::connect_with(&export.spec().socket, 1, PACKED);
        guest.front.add_mem_region(&guest.region()).unwrap();
        guest.start(0, NEW);
        Packed { guest, offered: 0, used: 0 }
    }

    /// The same guest, whose front end has found another device. It knows of the ring what it knew
    /// when it started it.
    fn reconnected(self, export: &VhostExport) -> Packed {
        let mut guest = FrontEnd::connect_with(&export.spec().socket, 1, PACKED);
        guest.file = self.guest.file;
        guest.front.add_mem_region(&guest.region()).unwrap();
        guest.start(0, NEW);
        Packed { guest, ..self }
    }

    fn place(position: u64) -> (u64, bool) {
        let size = u64::from(RING_SIZE);
        (position % size * 16, (position / size).is_multiple_of(2))
    }

    pub fn offer(&mut self, id: u16, pieces: &[(u64, u32, u16)]) {
        for (i, (address, len, flags)) in pieces.iter().enumerate().rev() {
            let (at, wrap) = Packed::place(self.offered + i as u64);
            let flags = flags | if wrap { AVAILABLE } else { USED };
            let fields = u128::from(*address)
                | u128::from(*len) << 64
                | u128::from(id) << 96
                | u128::from(flags) << 112;
            self.guest.put(at, &fields.to_le_bytes());
        }
        self.offered += pieces.len() as u64;
        self.guest.kick(0);
    }

    /// Waits until the chain of `descriptors` that comes next was used.
    pub fn wait(&mut self, descriptors: u64) -> (u16, u32) {
        let (at, wrap) = Packed::place(self.used);
        let expected = if wrap { AVAILABLE | USED } else { 0 };
        let entry = || self.guest.get(at + 8, 8);
        let flags = || u16::from_le_bytes(entry()[6..].try_into().unwrap());
        assert!(within(30_000, || flags() & (AVAILABLE | USED) == expected), "{:?}", entry());
        self.used += descriptors;
        let entry = entry();
        let id = u16::from_le_bytes(entry[4..6].try_into().unwrap());
        (id, u32::from_le_bytes(entry[..4].try_into().unwrap()))
    }

    /// The queue answers: the serial number is what was configured.
    fn answers(&mut self, id: u16) {
        self.guest.put(HEADER, &8u128.to_le_bytes());
        self.guest.put(DATA, &[0; 20]);
        let (data, status) = ((DATA, 20, WRITE | NEXT), (STATUS, 1, WRITE));
        self.offer(id, &[(HEADER, 16, NEXT), data, status]);
        assert_eq!(self.wait(3), (id, 21));
        assert_eq!(self.guest.get(DATA, 20), SERIAL.as_bytes());
    }
}

fn broken(export: &VhostExport, reason: &str) {
    assert!(within(10_000, || export.status().unwrap().queues_active() == 0), "{reason}");
    let said = export.status().unwrap().last_error.unwrap();
    assert!(said.contains(reason), "said {said:?}, expected {reason:?}");
}

#[test]
fn a_packed_ring_is_stopped_and_goes_on() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut driver = Packed::started(&export);
    for round in 0..40 {
        driver.answers(round);
        if round % 2 == 1 {
            driver.guest.front.set_vring_enable(0, false).unwrap();
        }
        let base = driver.guest.front.get_vring_base(0).unwrap();
        assert_eq!(driver.guest.get(DEVICE, 4), [0; 4], "what was told needs no mark");
        let (index, wrap) = Packed::place(driver.used);
        let place = (index / 16) as u32 | u32::from(wrap) << 15;
        assert_eq!(base, place | place << 16, "{round}");
        driver.guest.start(0, place as u16);
    }
    assert!(driver.guest.called(0, 10_000));
    assert_eq!(export.status().unwrap().last_error, None);
}

#[test]
fn a_packed_ring_outlives_a_daemon_that_is_stopped() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let path = socket_path();
    let mut export = rig.export_at(path.clone(), 1);
    let mut driver = Packed::started(&export);
    for round in 0..12 {
        (0..=round % 5).for_each(|id| driver.answers(id));
        drop(export);
        export = rig.export_at(path.clone(), 1);
        driver = driver.reconnected(&export);
    }
    driver.answers(99);
    assert_eq!(export.status().unwrap().last_error, None);
    // The front end may leave without a word, too.
    let mut driver = driver.reconnected_after_leaving(&export);
    driver.answers(98);
}

impl Packed {
    fn reconnected_after_leaving(self, export: &VhostExport) -> Packed {
        let Packed { guest, offered, used } = self;
        let file = guest.file.try_clone().unwrap();
        drop(guest);
        assert!(within(10_000, || !export.status().unwrap().connected));
        let mut guest = FrontEnd::connect_with(&export.spec().socket, 1, PACKED);
        guest.file = file;
        guest.front.add_mem_region(&guest.region()).unwrap();
        guest.start(0, NEW);
        Packed { guest, offered, used }
    }
}

/// What such a daemon had under way nobody knows, and what it had done looks like new work.
#[test]
fn a_packed_ring_of_a_daemon_that_was_killed_is_not_touched() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut driver = Packed::started(&export);
    driver.answers(1);
    let served = driver.guest.get(DEVICE, 4);
    let base = driver.guest.front.get_vring_base(0).unwrap();
    assert_ne!(driver.guest.get(DEVICE, 4), served);
    driver.guest.put(DEVICE, &served);
    driver.guest.start(0, NEW);
    broken(&export, "in the middle of its work");
    // The guest is reset, or its front end knows better than that.
    driver.guest.front.get_vring_base(0).unwrap();
    driver.guest.put(DEVICE, &[0; 4]);
    driver.guest.start(0, base as u16);
    driver.answers(2);
}

#[test]
fn each_breach_stops_the_queue_and_a_reset_cures_it() {
    type Breach = fn(&mut Packed);
    let cases: [(Breach, &str); 8] = [
        (|d| d.offer(0, &[(0, 0, 0)]), "no bytes"),
        (|d| d.offer(0, &[(0, 16, NEXT); RING_SIZE as usize]), "loop"),
        (|d| d.offer(0, &[(MEMORY_BYTES, 16, INDIRECT)]), "not in guest memory"),
        (|d| d.offer(0, &[(0x3000, 16, INDIRECT | NEXT)]), "has a next one"),
        (|d| d.offer(0, &[(0x3000, 8, INDIRECT)]), "table of 8 bytes"),
        (|d| d.offer(0, &[(HEADER, 15, 0)]), "header of 15 bytes"),
        (|d| d.offer(0, &[(HEADER, 16, 0)]), "no byte for the status"),
        (|d| d.offer(0, &[(HEADER, 16, WRITE | NEXT), (0, 16, 0)]), "behind a writable one"),
    ];
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    for (breach, reason) in cases {
        let mut driver = Packed::started(&export);
        driver.answers(7);
        breach(&mut driver);
        broken(&export, reason);
        let base = driver.guest.front.get_vring_base(0).unwrap();
        assert_eq!(base >> 16, 0x8003, "what cannot be answered is not used");
        // As a driver sets its ring up anew.
        driver.guest.put(0, &[0; 16 * RING_SIZE as usize]);
        (driver.offered, driver.used) = (0, 0);
        driver.guest.start(0, NEW);
        driver.answers(8);
        drop(driver);
        assert!(within(10_000, || !export.status().unwrap().connected));
    }
}

#[test]
fn a_packed_ring_may_have_any_size() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let guest = FrontEnd::connect_with(&export.spec().socket, 1, PACKED);
    for size in [1, 3, 15, 1000, 1024] {
        guest.front.set_vring_num(0, size).unwrap();
    }
    assert!(guest.front.set_vring_num(0, 1025).is_err());
}
