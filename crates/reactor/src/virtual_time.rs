//! A world of modelled drives whose clock jumps to whatever happens next: what an arrangement of
//! drives allows, to the nanosecond, however busy the machine is that finds it out. What a drive
//! does to memory, it does when its answer is due: a late one writes late.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::backend::{Backend, Instant};
use crate::model::Model;
use crate::op::{Device, DeviceId, Done, LATE, Op, Ticket};

#[derive(Default)]
pub struct VirtualBackend {
    now: Instant,
    /// `None`: let go, and its memory free.
    models: Vec<Option<Model>>,
    /// When to tell; at one moment, in the order of submission.
    due: BTreeMap<(Instant, u64), (Ticket, Op)>,
    submitted: u64,
    late: Vec<Ticket>,
}

impl VirtualBackend {
    fn model(&mut self, device: DeviceId) -> &mut Model {
        self.models[device.0 as usize].as_mut().expect("let go when nothing is under way on it")
    }
}

impl Backend for VirtualBackend {
    fn now(&self) -> Instant {
        self.now
    }

    fn register(&mut self, device: Device) -> DeviceId {
        let Device::Model { bytes, iops, bytes_per_second, latency } = device else {
            panic!("virtual time is for modelled drives only");
        };
        self.models.push(Some(Model::new(bytes, iops, bytes_per_second, latency)));
        DeviceId(u32::try_from(self.models.len() - 1).expect("few drives"))
    }

    fn unregister(&mut self, device: DeviceId) {
        assert!(self.models[device.0 as usize].take().is_some(), "let go twice");
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let device = op.device().expect("nothing in virtual time has a descriptor");
        let now = self.now;
        if now > until {
            self.late.push(ticket);
            return;
        }
        let at = self.model(device).answer_at(op, now);
        self.due.insert((at, self.submitted), (ticket, op.clone()));
        self.submitted += 1;
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.extend(self.late.drain(..).map(|ticket| Done { ticket, outcome: LATE }));
        let later = self.due.split_off(&(self.now.after(Duration::from_nanos(1)), 0));
        for (ticket, op) in std::mem::replace(&mut self.due, later).into_values() {
            let device = op.device().expect("looked at when it was submitted");
            let outcome = self.model(device).run_now(&op);
            done.push(Done { ticket, outcome });
        }
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        if !self.late.is_empty() {
            return true;
        }
        let next = self.due.first_key_value().map(|((at, _), _)| *at);
        let Some(next) = next.into_iter().chain(until).min() else { return false };
        self.now = self.now.max(next);
        true
    }
}
