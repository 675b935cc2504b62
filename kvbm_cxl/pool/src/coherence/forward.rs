// SPDX-License-Identifier: Apache-2.0
//! Wrappers of a memory: each states its own steps, and which of the others it forwards.

/// Forwards the named steps of [`Coherence`](crate::coherence::Coherence) to the memory in a field, in the `impl` of a wrapper. A step that
/// is neither forwarded nor stated is made of the wrapper's others, as the trait says.
#[macro_export]
macro_rules! forward_coherence {
    ($inner:tt: $($step:ident)*) => {
        $($crate::forward_coherence!(@$step $inner);)*
    };
    (@len_bytes $inner:tt) => { $crate::forward_coherence!(@as $inner fn len_bytes() -> u64); };
    (@load_line $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn load_line(offset: u64) -> $crate::Result<$crate::coherence::Line>);
    };
    (@write_line $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn write_line(offset: u64, line: &$crate::coherence::Line) -> $crate::Result<()>);
    };
    (@flush_line $inner:tt) => { $crate::forward_coherence!(@as $inner fn flush_line(offset: u64) -> $crate::Result<()>); };
    (@fence_stores $inner:tt) => { $crate::forward_coherence!(@as $inner fn fence_stores() -> ()); };
    (@fence_all $inner:tt) => { $crate::forward_coherence!(@as $inner fn fence_all() -> ()); };
    (@fence_loads $inner:tt) => { $crate::forward_coherence!(@as $inner fn fence_loads() -> ()); };
    (@flush_range $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn flush_range(offset: u64, len_bytes: u64) -> $crate::Result<()>);
    };
    (@flush_lines $inner:tt) => { $crate::forward_coherence!(@as $inner fn flush_lines(offsets: &[u64]) -> $crate::Result<()>); };
    (@load_lines $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn load_lines(offsets: &[u64], out: &mut [$crate::coherence::Line]) -> $crate::Result<()>);
    };
    (@prefetch_lines $inner:tt) => { $crate::forward_coherence!(@as $inner fn prefetch_lines(offsets: &[u64]) -> $crate::Result<()>); };
    (@copy_in $inner:tt) => { $crate::forward_coherence!(@as $inner fn copy_in(offset: u64, source: &[u8]) -> $crate::Result<()>); };
    (@copy_out $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn copy_out(offset: u64, destination: &mut [u8]) -> $crate::Result<()>);
    };
    (@copy_out_streaming $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn copy_out_streaming(offset: u64, destination: &mut [u8]) -> $crate::Result<()>);
    };
    (@store_streaming $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn store_streaming(source: &[u8], destination: &mut [u8]) -> ());
    };
    (@keeps_lines_whole $inner:tt) => { $crate::forward_coherence!(@as $inner fn keeps_lines_whole() -> bool); };
    (@sums_copies $inner:tt) => { $crate::forward_coherence!(@as $inner fn sums_copies() -> bool); };
    (@copy_out_summed $inner:tt) => {
        $crate::forward_coherence!(
            @as $inner fn copy_out_summed(offset: u64, destination: &mut [u8], sum: &mut $crate::coherence::LineSum) -> $crate::Result<()>
        );
    };
    (@check $inner:tt) => { $crate::forward_coherence!(@as $inner fn check(offset: u64, len_bytes: u64) -> $crate::Result<()>); };
    (@address $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn address(offset: u64, len_bytes: u64) -> Option<std::ptr::NonNull<u8>>);
    };
    (@device_address $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn device_address(offset: u64, len_bytes: u64) -> Option<std::ptr::NonNull<u8>>);
    };
    (@address_for_stores $inner:tt) => {
        $crate::forward_coherence!(@as $inner fn address_for_stores(offset: u64, len_bytes: u64) -> Option<std::ptr::NonNull<u8>>);
    };
    (@as $inner:tt fn $step:ident($($argument:ident: $type:ty),*) -> $result:ty) => {
        fn $step(&self, $($argument: $type),*) -> $result {
            self.$inner.$step($($argument),*)
        }
    };
}

pub(crate) use forward_coherence;
