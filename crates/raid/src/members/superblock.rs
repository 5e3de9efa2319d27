//! What the next superblock says of the members and their array.

use ashlar_format::array_superblock::{ArraySuperblock, Policy, StoredMember, StoredRange};
use ashlar_format::record::name_field;

use super::Members;
use crate::member::Member;
use crate::scrub_plan::ScrubMark;
use crate::settings::Settings;

impl Members {
    pub fn journal_from(&self) -> u64 {
        self.journal_from.get()
    }

    /// Changes the superblock's `journal_from`; `settled` makes it durable. Without a journal no
    /// batch is named.
    pub fn set_journal_from(&self, sequence: u64) {
        self.journal_from.set(sequence);
        self.generation.set(self.generation.get() + 1);
        if sequence == 0 {
            self.set_journal_newest(0);
        }
    }

    pub(crate) fn journal_newest(&self) -> u64 {
        self.journal_newest.get()
    }

    /// Changes the superblock's `journal_newest`; `settled` makes it durable.
    pub(crate) fn set_journal_newest(&self, sequence: u64) {
        if self.journal_newest.replace(sequence) != sequence {
            self.generation.set(self.generation.get() + 1);
            self.newest_since.set(self.generation.get());
        }
    }

    /// Whether no superblock names another one, after a crash.
    pub(crate) fn is_newest_durable(&self) -> bool {
        self.newest_since.get() <= self.durable_generation.get()
    }

    /// So often was a member fenced, or trusted anew, since the array was started.
    pub(crate) fn trust_changes(&self) -> u64 {
        self.trust_changes.get()
    }

    /// Those who have the newest batch may be too few from now on, and the next superblock, which
    /// says so of them, names none.
    pub(super) fn trust_changed(&self) {
        self.trust_changes.set(self.trust_changes.get() + 1);
        self.set_journal_newest(0);
    }

    pub fn policy(&self) -> Policy {
        self.policy.get()
    }

    /// Changes the policy; `settled` makes it durable.
    pub fn set_policy(&self, policy: Policy) {
        self.policy.set(policy);
        self.generation.set(self.generation.get() + 1);
    }

    pub fn settings(&self) -> Settings {
        self.settings.get()
    }

    /// Changes the settings; `settled` makes it durable.
    pub fn set_settings(&self, settings: Settings) {
        self.hide();
        self.settings.set(settings);
        self.generation.set(self.generation.get() + 1);
    }

    pub fn scrub(&self) -> ScrubMark {
        self.scrub.get()
    }

    /// What the next superblock says of the scrub.
    pub fn set_scrub(&self, mark: ScrubMark) {
        self.scrub.set(mark);
    }

    pub fn era(&self) -> u64 {
        self.era.get()
    }

    /// The journal is in this era, or in an earlier one; `settled` makes it durable.
    pub fn set_era(&self, era: u64) {
        if era > self.era.get() {
            self.era.set(era);
            self.generation.set(self.generation.get() + 1);
        }
    }

    /// As any member gets it.
    pub(super) fn superblock(&self) -> ArraySuperblock {
        self.superblock_of(&self.list.borrow())
    }

    /// The same, were these the members.
    pub(super) fn superblock_of(&self, list: &[Member]) -> ArraySuperblock {
        let layout = self.identity.layout();
        let mut superblock = ArraySuperblock::blank();
        superblock.array = self.identity.uuid;
        superblock.name = name_field(&self.identity.name).expect("checked at creation");
        superblock.level = layout.level as u8;
        superblock.copies = layout.copies;
        superblock.groups = layout.groups;
        superblock.data_chunks = layout.data;
        superblock.parity_chunks = layout.parity;
        superblock.member_count = u16::try_from(list.len()).expect("few members").into();
        superblock.chunk_bytes = layout.chunk_bytes.into();
        superblock.region_stripes = self.identity.region_stripes().into();
        superblock.stripes = layout.stripes.into();
        superblock.journal_from = self.journal_from.get().into();
        superblock.journal_newest = self.journal_newest.get().into();
        superblock.policy = self.policy.get() as u8;
        superblock.integrity = self.identity.integrity.into();
        if let Some(restripe) = self.identity.restripe() {
            superblock.old_data_chunks = restripe.old_data;
            superblock.restriped = restripe.saved.into();
        }
        superblock.settings = self.settings.get().stored();
        superblock.scrub_next = self.scrub.get().next.into();
        superblock.scrub_began = self.scrub.get().began_s.into();
        superblock.era = self.era.get().into();
        for (index, member) in list.iter().enumerate() {
            let stored = &mut superblock.members[index];
            let filled = &member.filled_flushed;
            *stored = StoredMember::new(member.drive_uuid, member.state, filled.first_gap());
            superblock.rebuilt_ahead[index] = StoredRange::new(&filled.longest_ahead());
            stored.catches_up = member.catches_up.into();
            stored.asked_generation = member.own.asked().into();
            superblock.sure_generations[index] = member.own.sure().into();
        }
        superblock
    }
}
