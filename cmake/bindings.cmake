# One extension module per .pyx; all of them link to the one libunimem in unimem/lib. What Cython
# would put into each, such as memoryviews, is in a module of its own, unimem._core.cyutility.
# scikit-build-core says where the headers of Python and NumPy are, and how a module is called. CMake
# would ask the Python that builds, which need not be the one that the wheel is for.
foreach(found Python_INCLUDE_DIR Python_NumPy_INCLUDE_DIR SKBUILD_SOABI)
  if(NOT ${found})
    message(FATAL_ERROR "${found} is not set: expected a build by pip, with NumPy installed")
  endif()
endforeach()
set(UNIMEM_CYTHON ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/cmake/cythonize.py)

# Every module runs without the interpreter's lock, where Python has none: docs/threads.md. Methods
# are C's, which are smaller than Cython's own and tell their signatures. Annotations are for stubs.
set(UNIMEM_CYTHON_OPTIONS -3 -X freethreading_compatible=True -X binding=False
  -X embedsignature=True -X embedsignature.format=clinic -X annotation_typing=False)
if(UNIMEM_COVERAGE)
  # gcov then counts the lines of the .pyx.
  list(APPEND UNIMEM_CYTHON_OPTIONS --line-directives)
endif()

set(UNIMEM_UTILITY unimem._core.cyutility)

file(GLOB UNIMEM_PXD CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/unimem/*/*.pxd
  ${CMAKE_SOURCE_DIR}/src/unimem/*/*/*.pxd)

# Modules that are called for each token: they are made fast. All others are made small.
set(UNIMEM_HOT unimem/_core/arrays unimem/_core/grid unimem/_core/region unimem/_core/tape
  unimem/kv/inputs unimem/kv/paged unimem/kv/types unimem/kv/cache/cache unimem/kv/cache/one_kind
  unimem/kv/cache/rows)

# Builds one module of a package, such as src/unimem/kv, from its C file, which a target makes.
function(unimem_add_module package module c_file maker)
  string(REGEX REPLACE "^(src|bench)/" "" target_folder ${package})
  string(REPLACE / _ target ${target_folder}_${module})
  string(REGEX REPLACE "[^/]+" ".." up ${target_folder})
  add_library(${target} MODULE ${c_file})
  add_dependencies(${target} ${maker})
  set_target_properties(${target} PROPERTIES
    PREFIX "" OUTPUT_NAME ${module} SUFFIX .${SKBUILD_SOABI}.so
    LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bindings/${target_folder}
    INSTALL_RPATH "$ORIGIN/${up}/unimem/lib" BUILD_WITH_INSTALL_RPATH ON)
  target_compile_definitions(${target} PRIVATE NPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION
    NPY_TARGET_VERSION=NPY_2_0_API_VERSION)
  # Nothing is ever thrown through a module.
  target_compile_options(${target} PRIVATE
    -fno-plt $<$<CONFIG:Release>:-fno-asynchronous-unwind-tables>)
  if("${target_folder}/${module}" IN_LIST UNIMEM_HOT)
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O2>)
  else()
    target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-Os>)
    target_compile_definitions(${target} PRIVATE CYTHON_UNPACK_METHODS=0
      CYTHON_FAST_THREAD_STATE=0 CYTHON_USE_DICT_VERSIONS=0)
  endif()
  target_include_directories(${target} SYSTEM PRIVATE
    ${Python_INCLUDE_DIR} ${Python_NumPy_INCLUDE_DIR})
  target_link_libraries(${target} PRIVATE unimem)
  install(TARGETS ${target} DESTINATION ${target_folder})
endfunction()

# Builds the named modules of a package, a folder such as src/unimem/kv. One call of Cython
# translates them: it reads what they share once. Their stubs are written, too: into the wheel, or,
# where Python files are used in place, beside the sources.
function(unimem_add_bindings package)
  string(REGEX REPLACE "^(src|bench)/" "" target_folder ${package})
  set(folder ${CMAKE_BINARY_DIR}/bindings/${target_folder})
  set(source_folder ${CMAKE_SOURCE_DIR}/${package})
  list(TRANSFORM ARGN REPLACE "(.+)" "${source_folder}/\\1.pyx" OUTPUT_VARIABLE sources)
  list(TRANSFORM ARGN REPLACE "(.+)" "${folder}/\\1.c" OUTPUT_VARIABLE c_files)
  file(MAKE_DIRECTORY ${folder})
  add_custom_command(
    OUTPUT ${c_files}
    COMMAND ${UNIMEM_CYTHON} ${UNIMEM_CYTHON_OPTIONS} --shared=${UNIMEM_UTILITY}
            -I ${CMAKE_SOURCE_DIR}/src ${sources} --output-file ${folder}
    DEPENDS ${sources} ${UNIMEM_PXD} ${CMAKE_SOURCE_DIR}/cmake/cythonize.py
    VERBATIM)
  if(SKBUILD_STATE STREQUAL "editable")
    set(stub_folder ${source_folder})
  else()
    set(stub_folder ${folder})
  endif()
  list(TRANSFORM ARGN REPLACE "(.+)" "${stub_folder}/\\1.pyi" OUTPUT_VARIABLE stubs)
  add_custom_command(
    OUTPUT ${stubs}
    COMMAND ${Python_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/stubs.py ${sources} --to ${stub_folder}
    DEPENDS ${sources} ${UNIMEM_PXD} ${CMAKE_SOURCE_DIR}/tools/stubs.py
    VERBATIM)
  if(NOT SKBUILD_STATE STREQUAL "editable")
    install(FILES ${stubs} DESTINATION ${target_folder})
  endif()
  string(REPLACE / _ bindings ${target_folder}_bindings)
  add_custom_target(${bindings} ALL DEPENDS ${c_files} ${stubs})
  foreach(module c_file IN ZIP_LISTS ARGN c_files)
    unimem_add_module(${package} ${module} ${c_file} ${bindings})
  endforeach()
endfunction()

set(UNIMEM_UTILITY_C ${CMAKE_BINARY_DIR}/bindings/unimem/_core/cyutility.c)
add_custom_command(
  OUTPUT ${UNIMEM_UTILITY_C}
  COMMAND ${UNIMEM_CYTHON} ${UNIMEM_CYTHON_OPTIONS} --module-name ${UNIMEM_UTILITY}
          --generate-shared=${UNIMEM_UTILITY_C}
  DEPENDS ${CMAKE_SOURCE_DIR}/cmake/cythonize.py
  VERBATIM)
add_custom_target(unimem_utility DEPENDS ${UNIMEM_UTILITY_C})
unimem_add_module(src/unimem/_core cyutility ${UNIMEM_UTILITY_C} unimem_utility)
unimem_add_bindings(src/unimem/_core status dlpack arrays foreign region mapping block tape grid
  load guard hashing tmpfs pieces)
unimem_add_bindings(src/unimem/base turns)
unimem_add_bindings(src/unimem/kv types inputs states paged scratchpad rotate_heads row_kernels)
unimem_add_bindings(src/unimem/kv/cache rows storage one_kind layered cache device)
unimem_add_bindings(src/unimem/weights header_bytes gguf safetensors tensor_lines)
unimem_add_bindings(src/unimem/engine thread_count rotation_op pieces_op advice_op forward)
unimem_add_bindings(bench/unimem_bench empty_call)
