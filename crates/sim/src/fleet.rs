//! The drives of the array, and the fault budget: which members may be damaged so that the level
//! still promises everything.
//!
//! A member is *impaired* from the moment a fault is planned for it until the array trusts it again
//! and nothing is wrong with its drive. While the members that are not impaired can stand for all,
//! no read, write or flush may fail. (A latent error counts like a dead drive, since an array may
//! give a drive up that cannot read.)

use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{ArraySuperblock, MemberState};
use ashlar_raid::label;
use ashlar_raid::layout::Layout;
use ashlar_raid::status::ArrayStatus;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;

use crate::drive::{SimDrive, Traits};
use crate::faults::Plan;
use crate::inspect::{owner, superblock};
use crate::world::{SharedWorld, World};

/// One block of litter in so many bytes: some in each chunk.
const LITTER_STEP_BYTES: usize = 12 << 10;

pub struct Fleet {
    world: SharedWorld,
    traits: Traits,
    mixed: bool,
    integrity: bool,
    pub layout: Layout,
    /// The drive of each member.
    pub slots: Vec<u32>,
    /// Drives that are about to become members, or were.
    joining: Vec<u32>,
    /// Drives that were members once.
    pub retired: Vec<u32>,
    uuids_issued: u16,
    by_uuid: BTreeMap<[u8; 16], u32>,
    /// By member: a drive that is going to die and has not yet.
    impaired: BTreeMap<usize, Option<u32>>,
    beyond: bool,
}

impl Fleet {
    pub fn new(world: &SharedWorld, layout: Layout, plan: &Plan) -> Fleet {
        let mut fleet = Fleet {
            world: world.clone(),
            traits: plan.traits,
            mixed: plan.mixed,
            integrity: plan.integrity,
            layout,
            slots: Vec::new(),
            joining: Vec::new(),
            retired: Vec::new(),
            uuids_issued: 0,
            by_uuid: BTreeMap::new(),
            impaired: BTreeMap::new(),
            beyond: plan.beyond,
        };
        for _ in 0..layout.members() {
            let drive = fleet.new_drive();
            fleet.slots.push(drive);
        }
        fleet
    }

    /// A drive that belongs to nobody.
    pub fn new_drive(&mut self) -> u32 {
        let number = self.world.borrow().drives.len();
        let uuid = self.new_uuid(number);
        let mut traits = self.traits;
        traits.zeroes ^= self.mixed && number.is_multiple_of(2);
        let mut blank = SimDrive::new(traits, uuid);
        litter(&mut blank, self.layout.parity, self.integrity);
        let drive = self.world.borrow_mut().add_drive(blank);
        self.by_uuid.insert(uuid, drive);
        drive
    }

    /// A drive that is to be added to the array: whether it is, the array says later.
    pub fn joining_drive(&mut self) -> u32 {
        let drive = self.new_drive();
        self.joining.push(drive);
        drive
    }

    /// A uuid for a drive; 255: it is not known yet for which.
    pub fn new_uuid(&mut self, drive: usize) -> [u8; 16] {
        self.uuids_issued += 1;
        let mut uuid = [7; 16];
        uuid[0] = u8::try_from(drive).unwrap_or(255);
        let [more, count] = self.uuids_issued.to_be_bytes();
        uuid[1] = count;
        uuid[2] += more;
        uuid
    }

    pub fn uuid(&self, drive: u32) -> [u8; 16] {
        self.world.borrow_mut().drive(drive).uuid
    }

    /// A new uuid for a drive that joins again.
    pub fn renew_uuid(&mut self, drive: u32) -> [u8; 16] {
        let uuid = self.new_uuid(drive as usize);
        self.world.borrow_mut().drive(drive).uuid = uuid;
        self.by_uuid.insert(uuid, drive);
        uuid
    }

    /// All drives of members, and those to come, get more bytes. How many they have then.
    pub fn grow(&mut self, more: u64) -> u64 {
        self.traits.bytes += more;
        for drive in self.slots.iter().chain(&self.joining) {
            self.world.borrow_mut().drive(*drive).grow(self.traits.bytes);
        }
        self.traits.bytes
    }

    /// Of each drive.
    pub fn bytes(&self) -> u64 {
        self.traits.bytes
    }

    /// A handle for the engine.
    pub fn open(&self, reactor: &Reactor, drive: u32) -> Rc<Drive> {
        let traits = self.world.borrow_mut().drive(drive).traits;
        let limits = Limits {
            bytes: traits.bytes,
            sector_bytes: traits.sector_bytes,
            zeroes_cheaply: traits.zeroes,
        };
        Drive::new(reactor, Device::Simulated { drive }, limits, &format!("d{drive}"))
    }

    /// Learns which drive each member has, and which members are well again.
    pub fn refresh(&mut self, status: &ArrayStatus) {
        while self.slots.len() > status.members.len() {
            // It was being added when the power failed, and no superblock knows of it.
            self.joining.extend(self.slots.pop());
            self.impaired.remove(&self.slots.len());
        }
        for (index, member) in status.members.iter().enumerate() {
            let named = member.drive.as_ref().and_then(|drive| drive.name()[1..].parse().ok());
            let known = named.or_else(|| self.by_uuid.get(&member.drive_uuid).copied());
            let Some(drive) = known else { continue };
            self.by_uuid.insert(member.drive_uuid, drive);
            if index == self.slots.len() {
                self.slots.push(drive);
                self.joining.retain(|joining| *joining != drive);
            }
            if self.slots[index] != drive {
                self.retired.retain(|retired| *retired != drive);
                self.retired.push(self.slots[index]);
                self.slots[index] = drive;
            }
        }
        self.layout.data = status.data_chunks;
        let mut world = self.world.borrow_mut();
        for (index, member) in status.members.iter().enumerate() {
            let alive = member.drive.as_ref().is_some_and(|drive| drive.is_alive());
            let drive = world.drive(self.slots[index]);
            let well = alive && member.state == MemberState::Trusted;
            if !well {
                // What it has missed is caught up with.
                drive.refused.clear();
                drive.failed_flush = false;
            }
            if !well || drive.dead || !drive.is_sound() {
                self.impaired.entry(index).or_insert(None);
            } else if self.is_spared(index, &world) {
                self.impaired.remove(&index);
            }
        }
    }

    fn is_spared(&self, index: usize, world: &World) -> bool {
        let doomed = self.impaired.get(&index).copied().flatten();
        doomed.is_none_or(|drive| world.drives[drive as usize].dead)
    }

    /// Planned deaths were called off.
    pub fn spare_all(&mut self) {
        self.impaired.values_mut().for_each(|doomed| *doomed = None);
    }

    pub fn any_impaired(&self) -> bool {
        !self.impaired.is_empty()
    }

    pub fn is_impaired(&self, index: usize) -> bool {
        self.impaired.contains_key(&index)
    }

    /// Whether a fault of this member is within the budget.
    pub fn may_impair(&self, index: usize) -> bool {
        let held = |member: usize| member != index && !self.impaired.contains_key(&member);
        let held: Vec<bool> = (0..self.layout.members()).map(held).collect();
        self.beyond || self.layout.survives(&held)
    }

    /// Whether more drives may be away for a moment than the array bears: some are fenced by and
    /// by, or when the first of them are back, so all others must be sound, and stay so. (One
    /// without power may be among them before the outage begins.)
    pub fn may_be_out(&self) -> bool {
        let world = self.world.borrow();
        let is_well = |index: usize| {
            let its = &world.drives[self.slots[index] as usize];
            let stays_away = its.dead && !its.unpowered;
            stays_away || its.is_sound() && self.is_spared(index, &world)
        };
        let stays_so = !world.expects_a_death();
        self.beyond || stays_so && (0..self.slots.len()).all(is_well)
    }

    /// Whether the drive of this member may be lost while no array runs: the others are well, and
    /// every drive says that they can be trusted.
    pub fn may_lose(&self, index: usize) -> bool {
        let world = self.world.borrow();
        let drives: Vec<&SimDrive> =
            self.slots.iter().map(|drive| &world.drives[*drive as usize]).collect();
        let said: Vec<ArraySuperblock> =
            drives.iter().filter(|its| !its.dead).filter_map(|its| superblock(its)).collect();
        let owners: Vec<Option<[u8; 16]>> = drives.iter().map(|its| owner(its)).collect();
        let trusted = |member: usize| {
            said.iter().all(|superblock| {
                // One that was just added is not known to all.
                superblock.members().get(member).is_some_and(|its| {
                    let is_own = || owners[member] == Some(its.drive);
                    its.state() == Ok(MemberState::Trusted) && is_own()
                })
            })
        };
        let held = |member: usize| {
            let well = !drives[member].dead && drives[member].is_sound();
            member != index && !self.impaired.contains_key(&member) && well && trusted(member)
        };
        let held: Vec<bool> = (0..self.slots.len()).map(held).collect();
        !drives[index].dead && self.layout.survives(&held)
    }

    /// Whether the drives of the other members that answer are as many as the array needs.
    pub fn can_without(&self, index: usize) -> bool {
        let world = self.world.borrow();
        let here = |member: usize| !world.drives[self.slots[member] as usize].dead;
        let held = (0..self.slots.len()).map(|member| member != index && here(member));
        self.layout.survives(&held.collect::<Vec<bool>>())
    }

    /// A fault strikes this member. `doomed`: its drive dies later.
    pub fn impair(&mut self, index: usize, doomed: Option<u32>) {
        // A drive that is to die still is, whatever else happens to its member.
        let known = self.impaired.get(&index).copied().flatten();
        self.impaired.insert(index, doomed.or(known));
    }

    /// Drives that answer, of members and (`returned`) of former members.
    pub fn offered(&self, returned: bool) -> Vec<u32> {
        let world = self.world.borrow();
        let former = self.retired.iter().filter(|_| returned);
        let all = self.slots.iter().chain(&self.joining).chain(former).copied();
        all.filter(|drive| !world.drives[*drive as usize].dead).collect()
    }
}

/// A drive that was never written is not empty: some blocks of the data area hold anything.
fn litter(drive: &mut SimDrive, parity: u8, integrity: bool) {
    let areas = label::plan_for(drive.traits.bytes, parity, integrity);
    let Some(areas) = areas else { return };
    drive.litter(areas.data.range().step_by(LITTER_STEP_BYTES));
}
