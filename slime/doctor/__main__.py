from slime.doctor import main

raise SystemExit(main())
