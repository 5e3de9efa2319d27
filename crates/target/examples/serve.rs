//! Serves a volume on RAM drives until its standard input ends: for guests, clients and profilers
//! that want an export without a daemon.
//!
//! `serve SOCKET [LEVEL [DRIVES [MIB [CPU]]]]`, where LEVEL is raid0, raid1, raid10, raid5 or raid6.
//! Prints the export's counters at the end, and at each line of input: `grow` adds half as much.
#![allow(clippy::unwrap_used, reason = "a tool for developers")]

use std::io::BufRead;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_target::vhost::{ExportSpec, VhostExport};

const POLL_WINDOW: Duration = Duration::from_micros(200);

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number =
        |at: usize, or: u64| arguments.get(at).map_or(or, |text| text.parse().expect("a number"));
    let socket = PathBuf::from(arguments.first().expect("serve SOCKET [LEVEL [DRIVES [MIB]]]"));
    let level = level(arguments.get(1).map_or("raid5", String::as_str));
    let (drives, bytes) = (number(2, 5), number(3, 256) << 20);
    let cpu = usize::try_from(number(4, 0)).expect("a CPU");
    let core = Core::start(cpu, POLL_WINDOW).unwrap();
    let (reply, made) = mpsc::channel();
    let letter = move |reactor: &Reactor| {
        let own = reactor.clone();
        reactor.spawn(async move {
            let drives = u8::try_from(drives).expect("few drives");
            let pool = make_pool(&own, level, drives, bytes).await;
            let volume = pool.create([2; 16], "disk", bytes).await.unwrap();
            reply.send((own.publish(Rc::new(volume)), own.publish(pool))).unwrap();
        });
    };
    core.sender().send(letter).unwrap();
    let (volume, pool) = made.recv().unwrap();
    let spec = ExportSpec { name: "disk".into(), socket, queues_max: 16, serial: "RAM".into() };
    let export = VhostExport::start(core.sender().clone(), volume, spec).unwrap();
    println!("ready");
    let mut size = bytes;
    for line in std::io::stdin().lock().lines() {
        if line.unwrap() == "grow" {
            size += bytes / 2;
            let (reply, grown) = mpsc::channel();
            let letter = move |reactor: &Reactor| {
                let pool = reactor.get(pool).unwrap();
                reactor.spawn(async move {
                    pool.resize("disk", size).await.unwrap();
                    reply.send(()).unwrap();
                });
            };
            core.sender().send(letter).unwrap();
            grown.recv().unwrap();
            export.resized();
        }
        println!("{:?}", export.status());
    }
    println!("{:?}", export.status());
    export.stop();
}

fn level(name: &str) -> Level {
    match name {
        "raid0" => Level::Raid0,
        "raid1" => Level::Raid1,
        "raid10" => Level::Raid10,
        "raid5" => Level::Raid5,
        "raid6" => Level::Raid6,
        _ => panic!("{name}: raid0, raid1, raid10, raid5 or raid6"),
    }
}

async fn make_pool(reactor: &Reactor, level: Level, drives: u8, bytes: u64) -> Rc<Pool> {
    let (name, chunk_bytes) = ("ram".to_owned(), 64 << 10);
    let spec = ArraySpec { uuid: [1; 16], name, level, chunk_bytes, copies: 0 };
    let data = match level {
        Level::Raid0 => drives,
        Level::Raid1 => 1,
        Level::Raid10 => drives / 2,
        Level::Raid5 => drives - 1,
        Level::Raid6 => drives - 2,
    };
    let bytes = bytes * 2 / u64::from(data) + (16 << 20);
    let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |i: u8| Drive::new(reactor, Device::Ram { bytes }, limits, &format!("ram{i}"));
    let drives = (0..drives).map(|i| ([i; 16], drive(i)));
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    Pool::open(array).await.unwrap()
}
