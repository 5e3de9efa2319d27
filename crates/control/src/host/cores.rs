//! What reactors do: how busy each is, what lives there, and how it serves its drives.

use std::collections::BTreeMap;

use ashlar_reactor::mapping;
use ashlar_reactor::uring::gauges::{DeviceReport, Report, Use};
use ashlar_reactor::uring::probe::Kernel;

use uuid::Uuid;

use crate::api::drive::{DriveQueue, Used};
use crate::api::export::Export;
use crate::api::status::{
    CoreCounters, CoreExport, CoreMemory, CoreStatus, IoUring, IoUringRefusal, PageBytes,
};
use crate::engine::{self, CoreReport};
use crate::host::{Attached, Host};
use crate::snapshot::traffic;

/// By reactor; those that do not answer are left out.
pub(super) type Reports = BTreeMap<usize, CoreReport>;

impl Host {
    /// Asks all reactors at once.
    pub(super) async fn reports(&self) -> Reports {
        let asked: Vec<_> =
            self.cores.iter().map(|core| tokio::spawn(engine::report(core))).collect();
        let mut reports = Reports::new();
        for (index, answer) in asked.into_iter().enumerate() {
            if let Ok(Ok(report)) = answer.await {
                reports.insert(index, report);
            }
        }
        reports
    }

    /// How the reactor of a drive's array serves it.
    pub(super) fn queue_of(&self, drive: &Attached, reports: &Reports) -> Option<DriveQueue> {
        let (array, _) = drive.used_by?;
        let core = self.look(|state| state.arrays.get(&array).map(|running| running.core))?;
        let fd = drive.device()?.fd()?;
        let gauges = &reports.get(&core)?.gauges;
        let device = gauges.devices.iter().find(|device| device.fd == fd)?;
        Some(queue(device))
    }

    pub(super) fn cores_with(&self, reports: &Reports, exports: &[Export]) -> Vec<CoreStatus> {
        let cores = self.cores.iter().enumerate();
        cores.map(|(index, core)| self.core_with(index, core.cpu(), reports, exports)).collect()
    }

    fn core_with(
        &self,
        index: usize,
        cpu: usize,
        reports: &Reports,
        exports: &[Export],
    ) -> CoreStatus {
        let (arrays, mut drives): (Vec<_>, Vec<String>) = self.look(|state| {
            let is_here =
                |array: &Uuid| state.arrays.get(array).is_some_and(|its| its.core == index);
            let arrays = state.arrays.keys().filter(|array| is_here(array));
            let drives = state
                .drives
                .iter()
                .filter(|(_, drive)| drive.used_by.is_some_and(|(array, _)| is_here(&array)));
            (arrays.copied().collect(), drives.map(|(name, _)| name.clone()).collect())
        });
        drives.sort_by(|a, b| natord::compare(a, b));
        let export = |export: &Export| {
            let part = export.parts.iter().find(|part| part.cpu == cpu)?;
            Some(CoreExport { name: export.name.clone(), queues_active: part.queues_active })
        };
        let report = reports.get(&index);
        let gauges = report.map(|report| &report.gauges);
        let place = self.topology.place(cpu);
        CoreStatus {
            cpu,
            node: place.node,
            cache: place.cache,
            arrays: arrays.into_iter().map(|array| self.array_name(array)).collect(),
            drives,
            exports: exports.iter().filter_map(export).collect(),
            traffic: report.map(|report| traffic(&report.traffic)),
            counters: gauges.map(counters),
            memory: gauges.map(|its| CoreMemory {
                buffers: page_bytes(its.buffers),
                drives: page_bytes(its.drives),
            }),
            io_uring: gauges.map(|its| io_uring(&its.kernel)),
        }
    }
}

fn queue(device: &DeviceReport) -> DriveQueue {
    DriveQueue {
        registered_file: used(device.file),
        fixed_buffers: used(device.buffers),
        polling: used(device.polling),
        passthrough: used(device.passthrough),
        depth: device.in_flight,
        depth_max: device.in_flight_max,
    }
}

fn used(its: Use) -> Used {
    match its {
        Use::Yes => Used { used: true, why_not: None },
        Use::No(why) => Used { used: false, why_not: Some(why.to_string()) },
    }
}

fn counters(report: &Report) -> CoreCounters {
    let its = report.counters;
    CoreCounters {
        busy_ppm: report.busy_ppm,
        busy_ns: its.busy_ns,
        slept_ns: its.slept_ns,
        turns: its.turns,
        enters: its.enters,
        submissions: its.submissions,
        completions: its.completions,
    }
}

fn page_bytes(its: mapping::PageBytes) -> PageBytes {
    PageBytes { huge: its.huge, transparent: its.transparent, small: its.small }
}

fn io_uring(kernel: &Kernel) -> IoUring {
    let words = |list: &[&str]| list.iter().map(|word| (*word).to_owned()).collect();
    let refused = kernel
        .refused
        .iter()
        .map(|(setup, errno)| IoUringRefusal { setup: setup.clone(), error: errno.to_string() });
    IoUring {
        setup: words(&kernel.setup),
        refused: refused.collect(),
        features: words(&kernel.features),
        operations: words(&kernel.operations),
    }
}
