# The inner loops, once per instruction set; which one runs is decided at run time. A file whose flags the compiler does
# not know, or that is for another CPU, compiles to nothing. Included by whoever compiles block_kernels_*.cpp.
include(CheckCXXCompilerFlag)
if(NOT KERNEL_LEVEL)
  set(KERNEL_LEVEL -O3)  # with sanitizers a lower one: unrolled and checked, the loops take minutes to compile
endif()
set(KERNEL_FLAGS "${KERNEL_LEVEL};-ffp-contract=fast;-fno-math-errno;-fno-trapping-math;-Wno-uninitialized;-Wno-maybe-uninitialized;-Wno-psabi")
set(FLAGS_portable "")
set(FLAGS_avx2 "-mavx2;-mfma;-mf16c")
set(FLAGS_avx512 "${FLAGS_avx2};-mavx512f;-mavx512bw;-mavx512dq;-mavx512vl;-mavx512vnni")
set(FLAGS_amx "${FLAGS_avx512};-mavx512bf16;-mamx-tile;-mamx-int8;-mamx-bf16")
foreach(SET portable avx2 avx512 amx)
  string(REPLACE ";" " " FLAGS "${FLAGS_${SET}}")
  check_cxx_compiler_flag("${FLAGS}" KNOWS_${SET})
  if(NOT KNOWS_${SET})
    set(FLAGS_${SET} "")
  endif()
  set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/block_kernels_${SET}.cpp PROPERTIES COMPILE_OPTIONS
    "${KERNEL_FLAGS};${FLAGS_${SET}}")
endforeach()
