//! The device as a host sees it.

use crate::settings::set;
use crate::sys;
use crate::testing::{Event, Instance, N, NEVER, Rig, can_allocate, count};
use std::fs;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

const LATENCY: Duration = Duration::from_millis(30);
const MIB: usize = 1 << 20;

fn set_latency() {
    assert!(set("latency_us", LATENCY.as_micros() as i64));
}

/// Writes, and what is queued behind them, wait until [`let_go`].
fn hold_writes() {
    assert!(set("hold_writes", 1));
}

fn let_go() {
    assert!(set("hold_writes", 0));
}

/// Whether `wait` is still waiting after a while. It may do so for ever.
fn blocks(wait: impl FnOnce() + Send + 'static) -> bool {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || {
        wait();
        sender.send(())
    });
    receiver.recv_timeout(Duration::from_millis(200)).is_err()
}

#[test]
fn a_host_access_through_a_device_pointer_would_fault() {
    let rig = Rig::new();
    // SAFETY: a valid tensor.
    let address = unsafe { (*rig.input).data } as usize;
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let protection = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let [from, to] = [from, to].map(|number| usize::from_str_radix(number, 16).unwrap());
        (from..to).contains(&address).then(|| &rest[..4])
    });
    assert_eq!(protection, Some("---p"));
}

#[test]
fn fresh_memory_holds_no_numbers_unless_nothing_is_computed() {
    let rig = Rig::new();
    assert!(rig.read(rig.input).iter().all(|value| value.is_nan()));
    drop(rig);
    let rig = Rig::new();
    set("null_compute", 1);
    // SAFETY: our buffer type; freed below.
    let buffer = unsafe { sys::ggml_backend_buft_alloc_buffer(crate::buffer_type::DEVICE_TYPE.get(), 64) };
    let mut tensor = sys::ggml_tensor { buffer, ..unsafe_copy(rig.input) };
    // SAFETY: the tensor has the buffer's whole memory, 64 bytes.
    unsafe { tensor.data = sys::ggml_backend_buffer_get_base(buffer) };
    assert_eq!(rig.read(&mut tensor), [0.0; N]);
    // SAFETY: nobody uses it any more.
    unsafe { sys::ggml_backend_buffer_free(buffer) };
}

fn unsafe_copy(tensor: *const sys::ggml_tensor) -> sys::ggml_tensor {
    // SAFETY: a valid tensor of the test's.
    unsafe { *tensor }
}

#[test]
fn commands_run_in_order_and_the_caller_does_not_wait() {
    let rig = Rig::new();
    let instance = rig.instance();
    let (first, second) = ([1.0; N], [2.0; N]);
    let (mut after_first, mut after_second) = ([0.0; N], [0.0; N]);
    rig.write(rig.input, &[5.0; N]);
    rig.write(rig.result, &[7.0; N]);
    hold_writes();
    instance.set(rig.input, &first);
    rig.compute(&instance);
    instance.get(rig.result, &mut after_first);
    instance.set(rig.input, &second);
    rig.compute(&instance);
    instance.get(rig.result, &mut after_second);
    let meanwhile = (rig.read(rig.input), rig.read(rig.result));
    let_go();
    instance.synchronize();
    assert_eq!(meanwhile, ([5.0; N], [7.0; N]), "something has run");
    assert_eq!((after_first, after_second), ([2.0; N], [4.0; N]));
}

#[test]
fn a_graph_takes_the_latency() {
    let rig = Rig::new();
    set_latency();
    let instance = rig.instance();
    let start = Instant::now();
    rig.compute(&instance);
    rig.compute(&instance);
    instance.synchronize();
    assert!(start.elapsed() >= 2 * LATENCY);
}

#[test]
fn an_asynchronous_write_reads_the_hosts_bytes_only_when_its_turn_comes() {
    let rig = Rig::new();
    hold_writes();
    let instance = rig.instance();
    let values = Box::into_raw(Box::new([1.0; N]));
    rig.write(rig.input, &[5.0; N]);
    rig.compute(&instance);
    instance.set(rig.input, values);
    // SAFETY: the test's own; the queue reads it once it is let go.
    unsafe { values.write([3.0; N]) };
    let_go();
    instance.synchronize();
    assert_eq!(rig.read(rig.input), [3.0; N]);
    assert_eq!(rig.read(rig.result), [10.0; N]);
    // SAFETY: boxed above.
    drop(unsafe { Box::from_raw(values) });
}

#[test]
fn a_queue_waits_for_another_ones_event() {
    let rig = Rig::new();
    set_latency();
    let (producer, consumer, event) = (rig.instance(), rig.instance(), Event::new());
    let mut seen = [0.0; N];
    rig.write(rig.input, &[4.0; N]);
    let start = Instant::now();
    rig.compute(&producer);
    producer.record(&event);
    consumer.wait(&event);
    consumer.get(rig.result, &mut seen);
    consumer.synchronize();
    assert!(start.elapsed() >= LATENCY);
    assert_eq!(seen, [8.0; N]);
    event.synchronize();
}

#[test]
fn a_copy_between_queues_keeps_the_order_of_both() {
    let rig = Rig::new();
    set_latency();
    let (producer, consumer) = (rig.instance(), rig.instance());
    let mut seen = [0.0; N];
    rig.write(rig.input, &[4.0; N]);
    rig.compute(&producer);
    producer.copy_to(&consumer, rig.result, rig.input);
    rig.compute(&consumer);
    consumer.get(rig.result, &mut seen);
    consumer.synchronize();
    assert_eq!(seen, [16.0; N]);
}

#[test]
fn an_event_that_was_never_recorded_holds_nobody_up() {
    let rig = Rig::new();
    let (instance, event) = (rig.instance(), Event::new());
    event.synchronize();
    instance.wait(&event);
    instance.synchronize();
}

#[test]
fn a_transfer_takes_its_time() {
    let rig = Rig::new();
    let bytes = size_of::<[f32; N]>() as u64;
    set("bandwidth_mbs", 1);
    let transfer = Duration::from_micros(bytes);
    let (instance, values, mut back) = (rig.instance(), [1.0; N], [0.0; N]);
    let start = Instant::now();
    for _ in 0..100 {
        instance.set(rig.input, &values);
        instance.get(rig.input, &mut back);
    }
    instance.synchronize();
    assert!(start.elapsed() >= 200 * transfer);
    let start = Instant::now();
    rig.write(rig.input, &values);
    assert!(start.elapsed() >= transfer);
}

#[test]
fn null_compute_leaves_results_alone_and_runs_at_once() {
    let rig = Rig::new();
    set("null_compute", 1);
    let instance = rig.instance();
    rig.write(rig.result, &[7.0; N]);
    instance.set(rig.input, &[1.0; N]);
    rig.compute(&instance);
    assert_eq!(rig.read(rig.input), [1.0; N]);
    assert_eq!(rig.read(rig.result), [7.0; N]);
    set("null_mul_mat_id_only", 1);
    rig.compute(&instance);
    instance.synchronize();
    assert_eq!(rig.read(rig.result), [2.0; N]);
}

#[test]
fn memory_ends_at_the_capacity_or_at_a_fault() {
    let rig = Rig::new();
    set("capacity_mib", 8);
    assert!(can_allocate(7 * MIB) && !can_allocate(8 * MIB));
    let (free, total) = crate::memory::free_and_total();
    assert_eq!(total, 8 * MIB);
    assert!((7 * MIB..8 * MIB).contains(&free));
    set("fault_alloc_over_mib", 4);
    assert!(can_allocate(3 * MIB) && !can_allocate(4 * MIB));
    set("fault_alloc_over_mib", 0);
    set("fault_alloc_once", 2);
    assert_eq!([(); 3].map(|()| can_allocate(MIB)), [true, false, true]);
    set("fault_alloc", 2);
    assert_eq!([(); 3].map(|()| can_allocate(MIB)), [true, false, false]);
    drop(rig);
}

#[test]
fn small_writes_are_not_held() {
    let rig = Rig::new();
    let instance = rig.instance();
    set("fault_min_bytes", size_of::<[f32; N]>() as i64 + 1);
    hold_writes();
    let values = [1.0; N];
    instance.set(rig.input, &values);
    let deadline = Instant::now() + NEVER;
    while rig.read(rig.input) != values && Instant::now() < deadline {
        thread::yield_now();
    }
    let has_arrived = rig.read(rig.input) == values;
    let_go();
    assert!(has_arrived);
}

#[test]
fn a_dropped_write_never_arrives() {
    let rig = Rig::new();
    let instance = rig.instance();
    set("fault_copy_once", 2);
    for values in [[1.0; N], [2.0; N]] {
        instance.set(rig.input, &values);
        instance.synchronize();
    }
    assert_eq!(rig.read(rig.input), [1.0; N]);
    instance.set(rig.input, &[3.0; N]);
    instance.synchronize();
    assert_eq!(rig.read(rig.input), [3.0; N]);
    set("fault_copy", 1);
    set("fault_min_bytes", 4096);
    instance.set(rig.input, &[4.0; N]);
    instance.synchronize();
    assert_eq!(rig.read(rig.input), [4.0; N]);
}

#[test]
fn only_graphs_with_experts_fail() {
    let rig = Rig::new();
    let instance = rig.instance();
    set("fault_compute_once", 2);
    let failed = || rig.compute_experts(&instance) != sys::GGML_STATUS_SUCCESS;
    assert_eq!(rig.compute(&instance), sys::GGML_STATUS_SUCCESS);
    assert_eq!([(); 3].map(|()| failed()), [false, true, false]);
    set("fault_compute", 1);
    assert_eq!([(); 2].map(|()| failed()), [true, true]);
    assert_eq!(rig.compute(&instance), sys::GGML_STATUS_SUCCESS);
}

#[test]
fn what_was_captured_is_computed_as_long_as_the_uid_is_the_same() {
    let rig = Rig::new();
    let instance = rig.instance();
    let before = count("captures");
    assert_eq!(rig.compute_experts_at(&instance, 0, 1), [true, false]);
    assert_eq!(rig.compute_experts_at(&instance, 0, 1), [true, false]);
    assert_eq!(rig.compute_experts_at(&instance, 0, 2), [true, false], "the same graph");
    assert_eq!(count("captures") - before, 1);
    assert_eq!(rig.compute_experts_at(&instance, 1, 2), [true, false], "it says that it is the same graph");
    assert_eq!(count("captures") - before, 1);
    assert_eq!(rig.compute_experts_at(&instance, 1, 3), [false, true]);
    assert_eq!(rig.compute_experts_at(&instance, 0, 0), [true, false], "it says nothing");
    assert_eq!(count("captures") - before, 3);
    set("capture_keep_ms", 0);
    std::thread::sleep(std::time::Duration::from_millis(2));
    assert_eq!(rig.compute_experts_at(&instance, 0, 0), [true, false]);
    assert_eq!(count("captures") - before, 4, "dropped");
}

#[test]
fn writes_that_are_queued_are_counted_and_small_ones_wait_for_the_bus() {
    let rig = Rig::new();
    let (one, other) = (rig.instance(), rig.instance());
    let values = [1.0; N];
    let bytes = size_of_val(&values) as i64;
    set("fault_min_bytes", bytes);
    set("bandwidth_mbs", 1);
    set("hold_writes", 1);
    (0..3).for_each(|_| one.set(rig.input, &values));
    set("hold_writes", 0);
    one.synchronize();
    assert!(count("most_large_writes_queued") >= 3);
    set("hold_writes", 1);
    one.set(rig.input, &values);
    set("fault_min_bytes", bytes + 1);
    set("hold_writes", 0);
    other.set(rig.result, &values);
    one.synchronize();
    other.synchronize();
    assert!(count("longest_bus_wait_us") <= bytes as u64, "no longer than a copy takes, at one byte per us");
}

#[test]
fn an_instance_that_cannot_be_made_is_null() {
    let rig = Rig::new();
    set("fault_init_once", 1);
    // SAFETY: our device; NULL parameters ask for defaults.
    assert!(unsafe { sys::ggml_backend_dev_init(crate::device::DEVICE.get(), std::ptr::null()) }.is_null());
    drop(rig.instance());
}

#[test]
fn what_is_counted() {
    let rig = Rig::new();
    let names =
        ["set_async_calls", "set_async_bytes", "large_writes", "get_async_calls", "graphs", "mul_mat_id_graphs"];
    let before = names.map(count);
    let instance = rig.instance();
    let mut values = [1.0; N];
    instance.set(rig.input, &values);
    set("fault_min_bytes", size_of_val(&values) as i64 + 1);
    instance.set(rig.input, &values);
    rig.compute(&instance);
    rig.compute_experts(&instance);
    instance.get(rig.result, &mut values);
    instance.synchronize();
    let after = names.map(count);
    let grown: Vec<_> = before.iter().zip(after).map(|(before, after)| after - before).collect();
    assert_eq!(grown, [2, 2 * size_of_val(&values) as u64, 1, 1, 2, 1]);
}

/// A process of its own, as nothing that waits for the device is of use after it.
#[test]
fn a_stuck_queue_stays_stuck_and_can_be_freed() {
    const CHILD: &str = "FAKE_TEST_OF_STUCK_QUEUE";
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::a_stuck_queue_stays_stuck_and_can_be_freed"])
            .env(CHILD, "1")
            .output();
        assert!(child.unwrap().status.success());
        return;
    }
    let rig = Rig::new();
    let stuck: &Instance = Box::leak(Box::new(rig.instance()));
    let other = rig.instance();
    let event: &Event = Box::leak(Box::new(Event::new()));
    let values = [1.0; N];
    set("fault_hang", 2);
    stuck.set(rig.input, &values);
    stuck.synchronize();
    stuck.set(rig.input, &values);
    stuck.record(event);
    assert!(blocks(|| stuck.synchronize()));
    assert!(blocks(|| event.synchronize()));
    other.set(rig.input, &values);
    other.synchronize();
    drop(rig.instance());
    let third = rig.instance();
    third.wait(event);
    drop(third);
    drop(other);
    drop(rig);
}
